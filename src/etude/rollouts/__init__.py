"""How experience is made: prompts, rewards, episodes and conversations as Data for a step."""
