"""Bodies of multipart/form-data, as paths for audio take them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from app.core.errors import InvalidRequest, cut
from app.http.json_body import MAX_MEMBERS, Fields, JsonBody, dumps

FORM = b"multipart/form-data"
_BOUNDARY = re.compile(rb"""(?i)boundary="?([^";,\s]{1,70})""")
_NAME = re.compile(rb"""(?i)[;\s]name="?([^";\r\n]{1,100})""")


@dataclass(slots=True)
class FormBody(JsonBody):
    """A form. members: its texts, as in JSON, without files."""

    @classmethod
    def of_form(cls, raw: bytes, content_type: bytes) -> FormBody:
        """Returns the form in a body. Raises InvalidRequest."""
        boundary = _BOUNDARY.search(content_type)
        if boundary is None:
            raise InvalidRequest("content-type", "names no boundary of the form's parts")
        members = dict[str, msgspec.Raw]()
        for part in raw.split(b"--" + boundary[1], MAX_MEMBERS):
            head, is_part, value = part.partition(b"\r\n\r\n")
            if is_part and (name := _NAME.search(head)) and b"filename" not in head.lower():
                text = name[1].decode(errors="replace")
                if text == "model" and text in members:
                    raise InvalidRequest(cut(text), "comes twice")
                said = value.removesuffix(b"\r\n").decode(errors="replace")
                members[text] = msgspec.Raw(dumps(said))
        return cls(raw, members, Fields(members))

    def changed(self, changes: Mapping[str, object], without: Collection[str] = ()) -> bytes:
        """Returns the form with another `model`, if `changes` name one."""
        if "model" not in changes or "model" not in self.fields:
            return self.text
        old = re.escape(self.fields["model"].encode())
        part = rb'(?i)(\sname="?model"?(?:\r\n[^\r\n]+)*\r\n\r\n)%b(?=\r\n--)' % old
        return re.sub(part, rb"\1" + str(changes["model"]).encode(), self.text, count=1)
