"""instructor: objects by a named tool and by a schema."""

from __future__ import annotations

import sys

import instructor
import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class Person(BaseModel):
    name: str
    age: int


def main() -> None:
    for mode, ask in (
        (instructor.Mode.TOOLS, "A person as a call, please"),
        (instructor.Mode.JSON_SCHEMA, "A person as JSON, please"),
    ):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode)
        found = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": ask}], response_model=Person, max_retries=0
        )
        assert (found.name, found.age) == ("Ada", 36), (mode, found)


main()
