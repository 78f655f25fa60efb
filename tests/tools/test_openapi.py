"""OpenAPI descriptions that name themselves: bounded, and said in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import ConfigError
from agentrl_cli.tools.openapi import DEEPEST, openapi_tools


def write(folder: Path, schemas: Any, **more: Any) -> Path:
    """A description with an operation that answers `Node`s, and one that takes one."""
    node = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Node"}}}}
    document = {
        "openapi": "3.1.0",
        "servers": [{"url": "http://127.0.0.1:8000"}],
        "paths": {
            "/nodes": {"get": {"operationId": "list", "responses": {"200": node}}},
            "/node": {"put": {"operationId": "write", "requestBody": node}},
            "/moved": {"$ref": "#/components/pathItems/Moved"},
        },
        "components": {
            "schemas": schemas,
            "pathItems": {
                "Moved": {
                    "get": {"operationId": "moved", "parameters": [{"name": "n", "in": "query"}]}
                }
            },
        },
        **more,
    }
    path = folder / "api.json"
    path.write_text(json.dumps(document))
    return path


def schema_of(fields: int, of: str = "Node") -> Any:
    return {
        "type": "object",
        "properties": {f"f{n}": {"$ref": f"#/components/schemas/{of}"} for n in range(fields)},
    }


def test_a_schema_that_names_itself_from_many_fields_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"Node": schema_of(200)})
    tools = openapi_tools("here", "api.json", tmp_path)  # what an operation answers is not read
    assert [tool.name for tool in tools] == ["list", "moved"]
    assert "n" in tools[1].schema["function"]["parameters"]["properties"]
    with pytest.raises(
        ConfigError, match=r"here: api.json: write has more than 20000 values .*\$refs"
    ) as caught:
        openapi_tools("here", {"file": "api.json", "operations": ["write"]}, tmp_path)
    assert "\n" not in caught.value.message


def test_schemas_that_fan_out_without_a_circle_are_refused(tmp_path: Path) -> None:
    chain = {f"S{n}": schema_of(40, f"S{n + 1}") for n in range(5)}
    write(tmp_path, {"Node": schema_of(40, "S0"), **chain, "S5": {"type": "string"}})
    with pytest.raises(ConfigError, match="more than 20000 values"):
        openapi_tools("here", {"file": "api.json", "operations": ["write"]}, tmp_path)


def test_a_schema_that_names_itself_once_is_followed_some_way(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"Node": {"type": "object", "properties": {"next": {"$ref": "#/components/schemas/Node"}}}},
    )
    (tool,) = openapi_tools("here", {"file": "api.json", "operations": ["write"]}, tmp_path)
    text = json.dumps(tool.schema)
    assert 1 < text.count('"next"') <= DEEPEST
