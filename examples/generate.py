"""Write one story, and say how long it took."""

import lily

with lily.Model.load(lily.DEMO) as model:
    story = model.generate("Tell me a story about a hen and a clever fox.", max_tokens=120, seed=7)

print(story)
print(f"\n{story.usage.completion_tokens} tokens, {story.timings.decode_tokens_per_second:.0f} tokens/s")
