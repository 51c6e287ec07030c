"""Instructor, by tools and by schemas: with_instructor.py URL MODEL"""

import sys

import instructor
import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
USER = {"role": "user", "content": "Where is the fox?"}


class Place(BaseModel):
    place: str
    rainy: bool
    names: list[str]


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="any"), mode=mode)
    place = client.chat.completions.create(
        model=MODEL, messages=[USER], response_model=Place, max_retries=0
    )
    assert isinstance(place, Place), mode
    *_, last = client.chat.completions.create_partial(
        model=MODEL, messages=[USER], response_model=Place, max_retries=0
    )
    assert last.place == place.place, mode
