# SPDX-License-Identifier: Apache-2.0
"""The deploy file: which plans a service makes, for which targets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cudnn_blocks.deploy.requests import AnyRequest
from cudnn_blocks.errors import ContractError
from cudnn_blocks.support import JSON_SCHEMA
from cudnn_blocks.target import TARGET_NAMES

TargetName = Literal[TARGET_NAMES]  # type: ignore[valid-type]


class DeployFile(BaseModel):
    """Configurations of ops and blocks, one plan each; docs/deploy.md."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    schema_: Annotated[str | None, Field(alias="$schema", description="of this file")] = None
    targets: Annotated[
        list[TargetName], Field(description="what to compile for, unless the command line says so")
    ] = []
    plans: Annotated[list[AnyRequest], Field(min_length=1)]

    def labels(self) -> list[str]:
        """A label for each plan: its name, or its op and its place."""
        return [plan.name or f"{plan.op} (plans[{place}])" for place, plan in enumerate(self.plans)]


def read_deploy_file(path: str | Path) -> DeployFile:
    """Reads and validates a file.

    Raises:
        ContractError: it is not JSON, or some part is not what the schema says; the part is named.
        OSError: it cannot be read.
    """
    try:
        return DeployFile.model_validate_json(Path(path).read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or str(path)
        raise ContractError(place, first["msg"], first["input"]) from error


def deploy_schema() -> dict[str, Any]:
    """JSON schema of the file."""
    return {"$schema": JSON_SCHEMA, **DeployFile.model_json_schema()}
