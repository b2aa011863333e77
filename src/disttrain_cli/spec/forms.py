"""Texts of a fixed form: a pattern for JSON Schema, and a description for errors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True)
class Form:
    """Annotation of a text field: its full value must match `pattern`; errors show `words`."""

    pattern: str
    words: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(schema) | {"pattern": self.pattern}

    def allows(self, value: str) -> bool:
        """Return True if the full value matches."""
        return re.fullmatch(self.pattern, value, re.ASCII) is not None

    def _checked(self, value: str) -> str:
        if not self.allows(value):
            raise ValueError(f"allowed: {self.words}")
        return value
