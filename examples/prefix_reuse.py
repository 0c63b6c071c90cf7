"""Take a prompt in once, and continue it in three ways."""

import lily

model = lily.Model.load(lily.DEMO)
prompt = model.prefill("Tell me a story about a boy who found a key.")

for seed in (1, 2):
    story = prompt.generate(max_tokens=80, seed=seed)
    print(f"seed {seed}, {story.usage.cached_tokens} tokens not computed again:\n{story}\n")

told = prompt.extend("Once upon a time there was a boy named Tom. He had a dog, and the dog")
print(f"from his dog on:\n{told.generate(max_tokens=80, temperature=0)}")
