"""Write tests/golden/chats.json: what transformers makes of the conversations in tests/conversations.py.

    python tools/make_chats.py

Needs transformers; PyTorch it does not need.
"""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import jinja2
import tokenizers
import transformers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from conversations import cases  # noqa: E402

TEMPLATE = ROOT / "tests" / "templates" / "thinking.jinja"


def main() -> None:
    """Render every case, or note how it is refused."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    renders = {}
    for name, (messages, variables) in cases().items():
        try:
            renders[name] = {"text": tokenizer.apply_chat_template(messages, tokenize=False, **variables)}
        except jinja2.TemplateError as refusal:
            renders[name] = {"refusal": str(refusal)}
    made = (
        f"{datetime.now(UTC):%Y-%m-%d}, transformers {transformers.__version__}, jinja2 {jinja2.__version__}"
    )
    file = ROOT / "tests" / "golden" / "chats.json"
    file.write_text(json.dumps({"made": made, "renders": renders}, ensure_ascii=False, indent=1) + "\n")
    refused = sum("refusal" in render for render in renders.values())
    print(f"{file}: {len(renders)} renders, {refused} of them refusals; {made}")


if __name__ == "__main__":
    main()
