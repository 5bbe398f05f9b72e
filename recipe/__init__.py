"""Recipes that come with Etude; docs/howto/recipes.md walks through them."""
