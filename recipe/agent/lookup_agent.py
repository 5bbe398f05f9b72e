"""An agent with one tool: the model may look the answer up, and must then repeat it."""


class LookupAgent:
    """Two turns: `?` calls the tool, which tells the answer; anything else is the answer itself."""

    def run(self, task, llm):
        """Return the reward of one rollout: most of it for the right answer, a little for asking."""
        first = llm.complete(task.prompt, max_tokens=1).text
        asked = first == "?"
        prompt = f"{task.prompt}?{task.answer}"
        answer = llm.complete(prompt, max_tokens=1).text if asked else first
        right = answer == task.answer
        return {"reward": 0.8 * right + 0.2 * asked, "text": answer, "score": {"asked": asked, "right": right}}
