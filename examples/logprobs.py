"""Show how sure the model was of each word it wrote, and what it would have written instead."""

import math

import lily

with lily.Model.load(lily.DEMO) as model:
    done = model.generate(
        "Tell me a story about a bear.", max_tokens=25, seed=2, logprobs=True, top_logprobs=3
    )

print(f"{done}\n")
for each in done.logprobs:
    others = "  ".join(f"{other.text!r} {math.exp(other.logprob):.0%}" for other in each.top)
    print(f"{each.text!r:14} {math.exp(each.logprob):4.0%}   of {others}")
