"""OpenAPI descriptions: their tools call the service; those that name themselves are bounded."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import load_pack
from agentrl_cli.commands import main
from agentrl_cli.errors import ConfigError
from agentrl_cli.plugins.web.openapi import DEEPEST, openapi_tools
from agentrl_cli.tools import ToolContext
from agentrl_cli.types import ToolResult
from tests.helpers.web import served


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


SERVICE = {
    "openapi": "3.1.0",
    "paths": {
        "/orders/{order}": {
            "parameters": [
                {"name": "order", "in": "path", "schema": {"$ref": "#/components/schemas/Order"}}
            ],
            "get": {"operationId": "get order", "summary": "One order."},
            "delete": {"operationId": "drop"},
        },
        "/orders": {
            "post": {
                "operationId": "add",
                "requestBody": {
                    "content": {
                        "application/json": {
                            "schema": {
                                "type": "object",
                                "properties": {"what": {"type": "string"}},
                                "required": ["what"],
                            }
                        }
                    }
                },
            }
        },
    },
    "components": {"schemas": {"Order": {"type": "string"}}},
}


def test_a_service_becomes_tools_that_call_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(path: str, body: Any) -> Any:
        return body if body is not None else (404 if "missing" in path else 200, path)

    with served(answer) as address:
        (tmp_path / "openapi.json").write_text(
            json.dumps({**SERVICE, "servers": [{"url": address}]})
        )
        monkeypatch.chdir(tmp_path)
        assert main(["init", "shop", "--from", "openapi.json"]) == 0
        assert "not offered: drop, add" in capsys.readouterr().err
        spec = tmp_path / "shop" / "task.yaml"
        spec.write_text(spec.read_text().replace("[get_order]", "[get_order, add]"))
        get, add = load_pack(tmp_path / "shop").tools
        assert get.schema["function"]["parameters"]["properties"] == {"order": {"type": "string"}}

        async def call(tool: Any, **arguments: Any) -> ToolResult:
            result: ToolResult = await tool.call(ToolContext(), arguments)
            return result

        assert asyncio.run(call(get, order="a/../b?x=1")).text == '"/orders/a%2F..%2Fb%3Fx%3D1"'
        assert asyncio.run(call(get, order="..")).error == "bad_arguments"
        missing = asyncio.run(call(get, order="missing"))
        assert missing.error == "exception" and "status 404" in missing.text
        assert asyncio.run(call(add, what="ink")).text == '{"what": "ink"}'
        assert asyncio.run(call(add)).error == "bad_arguments"
