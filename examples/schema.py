"""Replies of a given shape: a JSON schema, a regex, a grammar."""

from __future__ import annotations

import argparse
import json

import perdure

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2025},
        "fields": {"type": "array", "items": {"enum": ["physics", "music", "chess"]}, "maxItems": 3},
    },
    "required": ["name", "born", "fields"],
    "additionalProperties": False,
}
SUM = perdure.Grammar.lark(
    r"""
start: number " + " number " = " number
number: /[1-9][0-9]{0,2}/
"""
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a .gguf file or a name (default: the default model)")
    options = parser.parse_args()
    with perdure.open(options.model, n_ctx=512) as runtime:
        person = runtime.generate("Albert Einstein, as JSON: ", schema=PERSON, temperature=0)
        print(json.loads(person.text))
        print(runtime.generate("The date of the moon landing is ", regex=r"\d{4}-\d{2}-\d{2}").text)
        print(runtime.generate("A sum: ", grammar=SUM).text)
        try:
            runtime.generate("x", regex="(")
        except perdure.GrammarError as error:
            print(f"refused before any work: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    main()
