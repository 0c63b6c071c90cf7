"""Hold a conversation: each answer goes back as a message, and is shown while it is written.

Ctrl-C stops an answer; the model could go on to the next one.
"""

import lily

QUESTIONS = ["Tell me a story about a little boat.", "Tell me what happened then."]

with lily.Model.load(lily.DEMO) as model:
    messages = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        print(f"> {question}")
        stream = model.stream(messages, max_tokens=80, seed=3)
        for chunk in stream:
            print(chunk.text, end="", flush=True)
        print("\n")
        messages.append(stream.completion().message)  # its thoughts too, of a model that thinks
