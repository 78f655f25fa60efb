"""`fetch_page` and the tools of OpenAPI descriptions: what they answer, and what they refuse."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import ToolResult, load_pack
from agentrl_cli.errors import ConfigError, EnvError
from agentrl_cli.plugins.web.fetch_page import FetchTool, _public, html_text
from agentrl_cli.plugins.web.openapi import DEEPEST, openapi_tools
from tests.helpers.cli import Cli
from tests.helpers.web import Site, calls, serve_pages, served


@pytest.fixture
def site() -> Iterator[Site]:
    with serve_pages() as made:
        yield made


async def fetch(site: Site, path: str, **config: Any) -> ToolResult:
    """Fetch a page of the site, whose host is allowed; or another address."""
    tool = FetchTool(["127.0.0.1"], allow_private=True, **config)
    return (await calls(tool, {"url": path if "://" in path else site.url + path}))[0]


async def test_a_page_becomes_text(site: Site) -> None:
    html = (
        "<html><head><title>T</title><style>x</style></head><body><h1>Head</h1><p>One &amp; two</p>"
        "<script>no()</script><ul><li>x<li>y</ul>ü"
    )
    site.pages["/a?b=1"] = (200, {}, html.encode())
    assert (await fetch(site, "/a?b=1#there")).text == "Head\n\nOne & two\n\nx\ny\n\nü"
    site.pages["/t"] = (200, {"Content-Type": "text/plain"}, b"<b>" + b"x" * 50)
    assert (await fetch(site, "/t", width=10)).text == "<b>xxxxxxx\n[… cut …]"
    head = '<meta http-equiv="Content-Type" content="text/html; charset=gb2312">'
    site.pages["/gb"] = (200, {"Content-Type": "text/html"}, f"{head}中文".encode("gbk"))
    assert (await fetch(site, "/gb")).text == "中文"
    site.pages["/w/%E4%B8%AD%20a?q=%C3%A9%20%"] = site.pages["/t"]
    site.pages["/moved"] = (302, {"Location": "/w/中 a?q=é%20%".encode().decode("latin-1")}, b"")
    for path in ("/w/中 a?q=é%20%", "/moved"):
        assert (await fetch(site, path)).text.startswith("<b>x")


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("a<br>b<noscript>c</noscript>d", "a\nbd"),
        ("<!doctype html><head><title>T</title><body><p>No end of head", "No end of head"),
        ("<table><tr><td>a<td>b<tr><td>c<td>d</table>", "a b\nc d"),
        ("<p>one\n  sentence</p><dl><dt>term<dd>meaning</dl>", "one sentence\n\nterm\nmeaning"),
        ("<?xml version='1.0' encoding='latin-1'?><!-- x --><p>ü&nbsp;&lt;b&gt;</p>", "ü <b>"),
        ("<div>" * 1000 + "deep", "deep"),
        ("x" + "<div>" * 20_000 + "too deep", "x"),
        ("<!-- x -->", ""),
        ("", ""),
    ],
)
def test_text_of_pages_that_are_not_tidy(html: str, text: str) -> None:
    assert html_text(html) == text


def test_the_command_finds_it_and_its_schema_is_the_published_one(cli: Cli) -> None:
    limits = "allow no host (off), seconds 10.0, KiB 512, characters 8000, external True"
    assert limits in cli("tools", "show", "fetch_page").splitlines()
    assert "fetch_page" in {row["name"] for row in cli.json("tools", "list")}
    assert json.dumps(FetchTool().schema) == (
        '{"type": "function", "function": {"name": "fetch_page", "description": "Fetch a web page a'
        'nd return its text.", "parameters": {"type": "object", "properties": {"url": {"type": "str'
        'ing", "description": "The address, beginning with https://."}}, "required": ["url"]}}}'
    )


@pytest.mark.parametrize(
    ("allow", "url", "words"),
    [
        ([], "http://127.0.0.1/a", "is off"),
        (["example.org"], "http://example.org.evil.test/", "not on the list"),
        (["*.example.org"], "http://example.org/", "not on the list"),
        (["example.org"], "http://example.org@evil.test/", "user name"),
        (["example.org"], "ftp://example.org/", "not an http or https"),
        (["example.org"], "file:///etc/passwd", "not an http or https"),
        (["example.org"], "http://example.org:22/", "port 22"),
        (["https://example.org/help/"], "https://example.org/", "not on the list"),
        (["https://example.org/help/"], "https://example.org/helpless", "not on the list"),
        (["https://example.org/help/"], "https://example.org/help/../admin", "not on the list"),
        (["https://example.org/help/"], "http://example.org/help/a", "not on the list"),
        (["localhost"], "http://localhost/", "private address"),
        (["127.0.0.1"], "http://127.0.0.1/", "private address"),
        (["2130706433"], "http://2130706433/", "private address"),  # 127.0.0.1 as one number
        (["*"], "http://[::ffff:10.0.0.1]/", "private address"),
        (["*"], "http://169.254.169.254/latest/meta-data", "private address"),
    ],
)
async def test_addresses_that_are_refused(allow: list[str], url: str, words: str) -> None:
    (result,) = await calls(FetchTool(allow), {"url": url})
    assert result.error == "refused" and words in result.text


@pytest.mark.parametrize(
    ("allow", "url"),
    [
        ("Example.org", "http://EXAMPLE.org/x"),
        ("*.python.org", "https://docs.python.org/3/"),
        ("https://example.com/help/", "https://example.com/help/a?b"),
        ("https://example.com/help/", "https://example.com:443/help/a"),
        ("https://example.com:443/help/", "https://example.com/help/a"),
    ],
)
def test_addresses_that_fit(allow: str, url: str) -> None:
    assert FetchTool([allow]).check(url).hostname


async def test_redirects_are_checked_again(site: Site) -> None:
    site.pages |= {
        "/in": (302, {"Location": "/end"}, b""),
        "/end": (200, {}, b"there"),
        "/out": (302, {"Location": f"http://localhost:{site.port}/end"}, b""),
        "/round": (302, {"Location": "/round"}, b""),
    }
    assert (await fetch(site, "/in")).text == "there"
    for path, words in (
        ("/out", "localhost is not on the list"),
        ("/round", "more than 5"),
        ("/missing", "answered 404"),
    ):
        result = await fetch(site, path)
        assert result.error == "refused" and words in result.text


async def test_pages_are_bounded_in_size_kind_and_time(site: Site) -> None:
    site.pages |= {
        "/big": (200, {}, b"x" * 300_000),
        "/endless": (200, {}, b"x"),
        "/cut": (200, {}, b"x"),
        "/image": (200, {"Content-Type": "image/png"}, b"x"),
    }
    for path, words in (("/big", "larger than 64 KiB"), ("/image", "image/png, not text")):
        result = await fetch(site, path, kilobytes=64)
        assert result.error == "refused" and words in result.text
    assert (await fetch(site, "/endless", kilobytes=100_000, seconds=0.3)).error == "timeout"
    for path in ("http://127.0.0.1:9/", "/cut"):
        assert (await fetch(site, path)).error == "exception"
    with pytest.raises(ConfigError):
        FetchTool(["a"], seconds=0)


def test_no_spelling_of_an_address_reaches_what_is_not_public() -> None:
    closed = (
        "10.0.0.1", "::1", "fe80::1", "64:ff9b::7f00:1", "2002:7f00:1::", "224.0.0.1", "100.64.0.1", "0.0.0.0",
        "192.0.0.192", "168.63.129.16", "169.254.169.254", "100.100.100.200", "64:ff9b:1::7f00:1", "fec0::1",
        "::127.0.0.1", "::169.254.169.254", "::ffff:10.0.0.1", "2002:a9fe:a9fe::", "fd00:ec2::254",
        "2606:4700::5efe:10.0.0.1", "2606:4700::200:5efe:10.0.0.1", "192.88.99.1",
        "::ffff:0:169.254.169.254", "3fff::1", "5f00::1",
    )  # fmt: skip
    assert [address for address in closed if _public(address)] == []
    assert all(map(_public, ("1.1.1.1", "2606:4700::1", "2606:4700::1111", "64:ff9b::101:101")))


def write(folder: Path, schemas: Any, **more: Any) -> None:
    schema = {"schema": {"$ref": "#/components/schemas/Node"}}
    node = {"content": {"application/json": schema}, "required": True}
    moved = {"operationId": "moved", "parameters": [{"name": "n", "in": "query"}]}
    document = {
        "openapi": "3.1.0",
        "servers": [{"url": "http://127.0.0.1:8000"}],
        "paths": {
            "/nodes": {"get": {"operationId": "list", "responses": {"200": node}}},
            "/node": {"put": {"operationId": "write", "requestBody": node}},
            "/moved": {"$ref": "#/components/pathItems/Moved"},
        },
        "components": {"schemas": schemas, "pathItems": {"Moved": {"get": moved}}},
        **more,
    }
    (folder / "api.json").write_text(json.dumps(document))


def schema_of(fields: int, of: str = "Node") -> Any:
    return {
        "type": "object",
        "properties": {f"f{n}": {"$ref": f"#/components/schemas/{of}"} for n in range(fields)},
    }


def test_an_answer_is_not_read_and_a_reference_is_followed(tmp_path: Path) -> None:
    write(tmp_path, {"Node": schema_of(200)})
    tools = openapi_tools("here", "api.json", tmp_path)
    assert [tool.name for tool in tools] == ["list", "moved"]
    assert "n" in tools[1].schema["function"]["parameters"]["properties"]
    write(tmp_path, {"Node": {"type": "array"}})
    (tool,) = openapi_tools("here", {"file": "api.json", "operations": ["write"]}, tmp_path)
    assert tool.schema["function"]["parameters"]["required"] == ["body"]
    write(tmp_path, {"Node": schema_of(1)})  # which names itself
    (tool,) = openapi_tools("here", {"file": "api.json", "operations": ["write"]}, tmp_path)
    assert 1 < json.dumps(tool.schema).count('"f0"') <= DEEPEST


@pytest.mark.parametrize(
    "schemas",
    [
        {"Node": schema_of(200)},
        {
            "Node": schema_of(40, "S0"),
            **{f"S{n}": schema_of(40, f"S{n + 1}") for n in range(5)},
            "S5": {"type": "string"},
        },
    ],
    ids=["names itself", "fans out"],
)
def test_a_schema_that_grows_too_large_is_refused(tmp_path: Path, schemas: Any) -> None:
    write(tmp_path, schemas)
    said = r"here: api.json: write has more than 20000 values .*\$refs"
    with pytest.raises(ConfigError, match=said) as caught:
        openapi_tools("here", {"file": "api.json", "operations": ["write"]}, tmp_path)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "wrong",
    [
        {"parameters": [{"in": "query"}]},
        {"parameters": ["n"]},
        {"parameters": [{"name": "n", "in": "query", "schema": "string"}]},
        {"parameters": 3},
        {"requestBody": "Node"},
        {"parameters": [{"name": ["n"], "in": "query"}]},
        {"requestBody": {"content": {"application/json": {"schema": {"properties": ["n"]}}}}},
    ],
)
def test_an_operation_that_is_not_as_openapi_writes_it_is_named(tmp_path: Path, wrong: Any) -> None:
    get = {"operationId": "wrong", **wrong}
    write(tmp_path, {}, paths={"/wrong": {"get": get}, "/right": {"get": {"operationId": "right"}}})
    with pytest.raises(ConfigError, match=r"here: api\.json: wrong has parameters or a body"):
        openapi_tools("here", "api.json", tmp_path)
    (tool,) = openapi_tools("here", {"file": "api.json", "operations": ["right"]}, tmp_path)
    assert tool.name == "right"


def test_a_body_that_is_not_json_is_named_and_the_token_is_no_parameter(tmp_path: Path) -> None:
    token = {"name": "Authorization", "in": "header", "required": True}
    kinds = ("multipart/form-data", "application/json; charset=utf-8")
    form, text = ({"content": {kind: {"schema": schema_of(1, "Text")}}} for kind in kinds)
    posts = {
        f"/{name}": {"post": {"operationId": name, "requestBody": body, "parameters": [token]}}
        for name, body in (("form", form), ("text", text))
    }
    write(tmp_path, {"Text": {"type": "string"}}, paths=posts)
    (tool,) = openapi_tools("here", {"file": "api.json", "operations": ["text"]}, tmp_path)
    assert tool.schema["function"]["parameters"]["properties"] == {"f0": {"type": "string"}}
    with pytest.raises(ConfigError, match=r"form has a body that is not application/json"):
        openapi_tools("here", {"file": "api.json", "operations": ["form"]}, tmp_path)


@pytest.mark.parametrize("inner", ["properties", "allOf"])
def test_a_body_of_several_schemas_is_an_argument_with_all_their_fields(
    tmp_path: Path, inner: str
) -> None:
    named = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    base = named if inner == "properties" else {"allOf": [named, True]}
    more = {
        "allOf": [{"$ref": "#/components/schemas/Base"}],
        "anyOf": [True],
        "properties": {"tag": {"type": "string"}},
    }
    body = {"content": {"application/json": {"schema": more}}, "required": True}
    write(
        tmp_path,
        {"Base": base},
        paths={"/p": {"post": {"operationId": "add", "requestBody": body}}},
    )
    (tool,) = openapi_tools("here", {"file": "api.json", "operations": ["add"]}, tmp_path)
    parameters = tool.schema["function"]["parameters"]
    assert list(parameters["properties"]) == parameters["required"] == ["body"]
    assert parameters["properties"]["body"]["allOf"] == [base]


def test_operations_whose_names_agree_in_64_characters_are_all_offered(tmp_path: Path) -> None:
    long = "/organizations/{organization}/projects/{project}/environments"
    places: dict[str, Any] = {f"{long}/{end}": {"get": {}} for end in ("state", "status", "x")}
    write(
        tmp_path,
        {},
        paths=places
        | {"/a": {"get": {"operationId": "a-b"}}, "/b": {"get": {"operationId": "a_b"}}},
    )
    tools = openapi_tools("here", "api.json", tmp_path)
    assert len({tool.name for tool in tools}) == 5 and max(len(tool.name) for tool in tools) <= 64
    assert [tool.name for tool in tools][-2:] == ["a_b", "a_b_2"]


def test_a_cookie_that_is_required_is_named_and_another_left_out(tmp_path: Path) -> None:
    gets = {
        name: {
            "operationId": name,
            "parameters": [{"name": "id", "in": "cookie", "required": not_free}],
        }
        for name, not_free in (("free", False), ("bound", True))
    }
    write(tmp_path, {}, paths={f"/{name}": {"get": get} for name, get in gets.items()})
    (tool,) = openapi_tools("here", {"file": "api.json", "operations": ["free"]}, tmp_path)
    assert tool.schema["function"]["parameters"]["properties"] == {}
    with pytest.raises(ConfigError, match=r"bound needs id in a cookie"):
        openapi_tools("here", "api.json", tmp_path)


def test_paths_of_a_service_are_a_mapping(tmp_path: Path) -> None:
    write(tmp_path, {}, paths=["/orders"])
    with pytest.raises(ConfigError, match=r"api\.json: `paths` must be a mapping"):
        openapi_tools("here", "api.json", tmp_path)


@pytest.mark.parametrize("number", ["10 s", 0, -1, True])
@pytest.mark.parametrize("key", ["timeout", "kilobytes"])
def test_a_limit_of_a_service_is_a_number_above_0(tmp_path: Path, key: str, number: Any) -> None:
    write(tmp_path, {})
    with pytest.raises(ConfigError, match=f"here: {key} of `openapi` must be a number above 0"):
        openapi_tools("here", {"file": "api.json", key: number}, tmp_path)


SERVICE = {
    "openapi": "3.1.0",
    "paths": {
        "/orders/{order}": {
            "parameters": [
                {"name": "order", "in": "path", "schema": {"$ref": "#/components/schemas/Order"}}
            ],
            "get": {
                "operationId": "get order",
                "summary": "One order.",
                "parameters": [
                    {"name": "q", "in": "query", "schema": {"title": "Q"}},
                    {"name": "h", "in": "header", "schema": {"title": "H"}},
                    {"name": "order", "in": "query"},
                    {"name": "a", "in": "query", "explode": False, "schema": {"title": "A"}},
                    {
                        "name": "p",
                        "in": "query",
                        "style": "pipeDelimited",
                        "schema": {"title": "P"},
                    },
                    {"name": "d", "in": "query", "style": "deepObject", "schema": {"title": "D"}},
                    {
                        "name": "j",
                        "in": "query",
                        "content": {"application/json": {"schema": {"type": "object"}}},
                    },
                ],
            },
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
    "components": {"schemas": {"Order": {"title": "O"}}},
}


async def test_a_service_becomes_tools_that_call_it(cli: Cli, tmp_path: Path) -> None:
    def answer(path: str, body: Any) -> Any:
        return body if body is not None else (404 if "missing" in path else 200, path)

    with served(answer) as address:
        service = json.dumps({**SERVICE, "servers": [{"url": address}]})
        (tmp_path / "openapi.json").write_text(service)
        cli("init", "shop", "--from", "openapi.json", said="not offered: drop, add")
        spec = tmp_path / "shop" / "task.yaml"
        spec.write_text(spec.read_text().replace("[get_order]", "[get_order, add]"))
        get, add = load_pack(tmp_path / "shop").tools
        properties = get.schema["function"]["parameters"]["properties"]
        titles = {
            name: {"title": title}
            for name, title in zip(("order", *"qhapd"), "OQHAPD", strict=True)
        }
        assert properties == {
            **titles,
            "order_in_query": {"type": "string"},
            "j": {"type": "object"},
        }
        assert get.schema["function"]["parameters"]["required"] == ["order"]
        odd, above, missing = await calls(
            get, {"order": "a/../b?x=1"}, {"order": ".."}, {"order": "missing"}
        )
        assert odd.text == '"/orders/a%2F..%2Fb%3Fx%3D1"' and above.error == "bad_arguments"
        assert missing.error == "exception" and "status 404" in missing.text
        null, whole, several = await calls(
            get,
            *({"order": "a", "q": value, "h": None} for value in (None, 3.0, [True, {"b": "ü"}])),
        )
        assert (null.text, whole.text) == ('"/orders/a"', '"/orders/a?q=3"')
        assert several.text == '"/orders/a?q=true&q=%7B%22b%22%3A+%22%C3%BC%22%7D"'
        for given, sent in (
            ({"order": ["a", 2]}, "a,2"),
            ({"order": {"k": 1}, "order_in_query": "up"}, "k,1?order=up"),
            ({"order": "a", "a": [1, "x"], "p": {"k": 1}}, "a?a=1%2Cx&p=k%7C1"),
            ({"order": "a", "q": {"k": 1, "l": "m"}, "d": {"k": 2}}, "a?k=1&l=m&d%5Bk%5D=2"),
            ({"order": "a", "a": [], "j": {"k": [1]}}, "a?j=%7B%22k%22%3A+%5B1%5D%7D"),
        ):
            (said,) = await calls(get, given)
            assert json.loads(said.text) == f"/orders/{sent}"
        ink, empty = await calls(add, {"what": "ink"}, {})
        assert ink.text == '{"what": "ink"}' and empty.error == "bad_arguments"


async def test_a_service_whose_token_is_not_set_is_a_fault_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOP_TOKEN", raising=False)
    write(tmp_path, {}, paths={"/a": {"get": {"operationId": "a"}}})
    given = {"file": "api.json", "server": "http://127.0.0.1:9", "auth_token_env": "SHOP_TOKEN"}
    (tool,) = openapi_tools("here", given, tmp_path)
    with pytest.raises(EnvError, match="names SHOP_TOKEN, which is not set"):
        await calls(tool, {})
    monkeypatch.setenv("SHOP_TOKEN", "t")
    with pytest.raises(EnvError, match="cannot be reached"):
        await calls(tool, {})
