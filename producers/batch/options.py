"""What callers may ask of files and batches: the form's fields, the body, the pages. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from contracts.batch import FilePurpose
from contracts.errors import ApiError, ErrorCode
from infra.files_redis import MAX_LIFE_SECONDS

from ..api_parameters import Parameter
from ..metadata import Metadata
from ..refusals import invalid, refused_field
from .endpoints import ENDPOINTS

COMPLETION_WINDOW: Final = "24h"
WINDOW_MS: Final = 86_400_000
_SHORTEST_LIFE_SECONDS: Final = 3_600
_MAX_FILENAME_CHARACTERS: Final = 255

PURPOSE: Final = Parameter(
    "purpose", "query", "Only files for this.", {"type": "string", "enum": list(FilePurpose)}
)


def wanted_purpose(query: Mapping[str, str]) -> FilePurpose | None:
    """The purpose that a list is about; None = all.

    Raises:
        ApiError: 400.
    """
    raw = query.get("purpose")
    if raw is None:
        return None
    try:
        return FilePurpose(raw)
    except ValueError:
        raise invalid("purpose", f"must be one of {', '.join(FilePurpose)}.") from None


class _Lifetime(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=_SHORTEST_LIFE_SECONDS, le=MAX_LIFE_SECONDS)]


class BatchBody(BaseModel):
    """The body that creates a batch. Fields that are not listed are ignored; null means absent."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, title="BatchRequest")

    input_file_id: str
    endpoint: str = Field(json_schema_extra={"enum": list(ENDPOINTS)})
    completion_window: Literal["24h"]
    metadata: Metadata = None
    output_expires_after: _Lifetime | None = None


def parse_batch_body(body: object) -> BatchBody:
    """Validate the body that creates a batch.

    Raises:
        ApiError: 400 that names the field.
    """
    if not isinstance(body, dict):
        raise ApiError(ErrorCode.INVALID_REQUEST, "The body must be a JSON object.")
    try:
        found = BatchBody.model_validate(body)
    except ValidationError as error:
        raise refused_field(error) from None
    if found.endpoint not in ENDPOINTS:
        raise invalid("endpoint", f"must be one of {', '.join(ENDPOINTS)}.")
    return found


@dataclass(frozen=True, slots=True)
class UploadOptions:
    """What an upload's form says beside the content.

    Attributes:
        life_seconds: None = the configured lifetime.
    """

    filename: str
    life_seconds: int | None


def parse_upload_fields(fields: Mapping[str, str], filename: str) -> UploadOptions:
    """Validate the text fields of an upload's form. Unknown ones are ignored.

    Raises:
        ApiError: 400 that names the field.
    """
    if fields.get("purpose") != FilePurpose.BATCH:
        raise invalid("purpose", f"must be {FilePurpose.BATCH}: that is what files are for here.")
    life: int | None = None
    named = {name: fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds")}
    if any(value is not None for value in named.values()):
        life = _lifetime(named).seconds
    printable = "".join(c for c in filename if c.isprintable())
    return UploadOptions(printable[:_MAX_FILENAME_CHARACTERS] or "upload.jsonl", life)


def _lifetime(named: Mapping[str, str | None]) -> _Lifetime:
    # Form fields are text, so a number is what reads as one.
    try:
        return _LIFETIME.validate_python(dict(named), strict=False)
    except ValidationError:
        raise invalid(
            "expires_after",
            f"needs anchor created_at and seconds from {_SHORTEST_LIFE_SECONDS} to {MAX_LIFE_SECONDS}.",
        ) from None


_LIFETIME: Final = TypeAdapter(_Lifetime)

#: JSON schema of an upload's form.
UPLOAD_SCHEMA: Final[dict[str, Any]] = {
    "title": "FileUpload",
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "JSON lines in UTF-8."},
        "purpose": {"type": "string", "enum": [FilePurpose.BATCH.value]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": _SHORTEST_LIFE_SECONDS,
            "maximum": MAX_LIFE_SECONDS,
        },
    },
}
