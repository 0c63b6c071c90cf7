"""Hold a conversation: each answer goes back as a message, and is shown while it is written.

Ctrl-C stops an answer, and the next question is asked.
"""

import lily

QUESTIONS = ["Tell me a story about a little boat.", "Tell me what happened then."]

with lily.Model.load(lily.DEMO) as model:
    messages = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        print(f"> {question}")
        stream = model.stream(messages, max_tokens=80, seed=3)
        try:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        except KeyboardInterrupt:
            print(" ...", end="")
        print("\n")
        messages.append(stream.so_far().message)  # its thoughts too, of a model that thinks
