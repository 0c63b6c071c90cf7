"""Show a story while it is written. Ctrl-C stops it; the model could go on to the next one."""

import lily

messages = [
    {"role": "user", "content": "Tell me a story about a little boat."},
    {"role": "assistant", "content": "Once upon a time there was a little boat that lived by the sea."},
    {"role": "user", "content": "Tell me what happened then."},
]

model = lily.Model.load(lily.DEMO)
for chunk in model.stream(messages, max_tokens=120, seed=3):
    print(chunk.text, end="", flush=True)
print()
