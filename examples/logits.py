"""Score a text: how surprising the model finds each word of it, and what it expects next."""

import numpy as np

import lily

model = lily.Model.load(lily.DEMO)
tokens = model.tokenizer.encode("Once upon a time there was a little girl who lived in a very small teapot.")

logits = model.logits(tokens)  # (T, vocab): row t is about the token after tokens[: t + 1]
log_probability = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)

for t in range(1, len(tokens)):
    print(f"{model.tokenizer.decode([tokens[t]])!r:12} {log_probability[t - 1, tokens[t]]:7.2f}")

likeliest = np.argsort(logits[-1])[::-1][:5]
print("next:", [model.tokenizer.decode([token]) for token in likeliest])
