"""Real agent frameworks against the gateway: every turn is recorded, and none but one forks its history."""

from __future__ import annotations

import pytest

from benchmarks.clients import CLIENTS, Client, fork_trace

pytestmark = pytest.mark.filterwarnings(
    "default"
)  # other projects' own deprecations are not this suite's


@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
async def test_a_client_keeps_its_history(client: Client) -> None:
    if missing := client.missing:
        pytest.skip(f"{missing} is not installed: pip install 'agentrl-cli[agents]'")
    trace = await fork_trace(client)
    assert trace.forks == client.forks
    assert trace.calls == client.calls and trace.malformed == 0
    assert [drift for drift in trace.drift if drift.kind == "structural"] == []
    sampled = [
        turn for turn in trace.turns if trace.tokens.slice(turn.start, turn.end).trained_mask.any()
    ]
    assert len(sampled) == client.calls
