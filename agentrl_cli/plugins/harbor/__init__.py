"""Harbor task folders as packs: `agentrl init --from harbor:FOLDER`."""

from __future__ import annotations

OFFERS = {"sources": {"harbor": "agentrl_cli.plugins.harbor.source:add"}}
