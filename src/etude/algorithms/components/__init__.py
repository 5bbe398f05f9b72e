"""Trainers of models made of components: how a batch becomes losses of several parts, and one update of all of them."""
