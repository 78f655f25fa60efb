"""minimind's rows: conversations (tools in the system message), gt; the last message is a placeholder."""

from __future__ import annotations

from agentrl_cli.errors import DataError
from agentrl_cli.tasks.forms import Form, Row, conversation, plain_messages, tool_names


def convert(row: Row) -> Row:
    """Drop the last message of agent RL and RLAIF rows, as in https://github.com/jingyaogong/minimind"""
    said, schemas = conversation(row.pop("conversations"), None)
    if len(said) < 2:
        raise DataError(
            "`conversations` must be a list of at least two messages, the last one a placeholder."
        )
    row["prompt"] = plain_messages(said[:-1])
    row["tools"] = tool_names(schemas) if schemas else None
    row["tool_schemas"] = schemas
    if not isinstance(row.get("gt", []), list):
        row["gt"] = [row["gt"]]
    return row


FORM = Form(lambda row: "conversations" in row, convert)
