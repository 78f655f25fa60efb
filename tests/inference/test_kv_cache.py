"""Blocks that several sequences share: who uses them, and what a write does to the others."""

import asyncio
from typing import Any

import numpy as np
import torch

from agentrl_cli.inference.engine import Scheduler
from agentrl_cli.inference.kv_cache import BLOCK, BlockPool, KVCache
from agentrl_cli.inference.request import Request, TokenSequence
from agentrl_cli.types import Int32, Sampling

SHARED = 2 * BLOCK + 10


def sequence(key: str, *, seed: int, length: int = 3 * BLOCK) -> TokenSequence:
    """Return a sequence that begins as all others do for SHARED positions."""
    common = np.arange(SHARED, dtype=np.int32)
    own = np.random.default_rng(seed).integers(1000, 2000, length - SHARED, dtype=np.int32)
    return TokenSequence(key=key, ids=np.concatenate([common, own]))


def write(pool: BlockPool, table: list[int], ids: Int32, start: int) -> None:
    one = torch.ones(1, 1, 1, 1)
    for layer in range(pool.layers):
        keys, values = pool.store(layer, one, one)
        for position in range(start, len(ids)):
            block, offset = table[position // BLOCK], position % BLOCK
            keys[block, :, :, offset] = float(ids[position])
            values[block, :, offset] = float(ids[position])


def read(pool: BlockPool, table: list[int], count: int) -> list[int]:
    stores = [t for t in (*pool.keys, *pool.values) if t is not None]
    rows = [torch.cat([store[block].reshape(-1) for block in table])[:count] for store in stores]
    assert len(rows) == 2 * pool.layers and all(row.equal(rows[0]) for row in rows)
    return [int(value) for value in rows[0]]


def test_a_shared_block_that_is_written_is_copied_first() -> None:
    pool = BlockPool(2, 64)
    cache = KVCache(pool)
    first, second = sequence("a", seed=1), sequence("b", seed=2)
    assert cache.begin(first) == 0
    write(pool, first.block_table, first.ids, 0)
    prefix = cache.add_prefix(first.ids[:SHARED])
    assert prefix is not None
    table = prefix[0].blocks
    write(pool, table, first.ids[:SHARED], prefix[1])
    # The second may use all that it shares, and must not write into the block where it parts.
    assert cache.begin(second) == SHARED
    assert second.block_table[:2] == table[:2] and second.block_table[2] not in table
    assert [pool.users[block] for block in table] == [2, 2, 1]
    write(pool, second.block_table, second.ids, SHARED)
    assert read(pool, second.block_table, len(second.ids)) == second.ids.tolist()
    assert read(pool, first.block_table, len(first.ids)) == first.ids.tolist()
    assert read(pool, table, SHARED) == first.ids[:SHARED].tolist()
    for each in (first, second):
        cache.free(each)
    cache.clear()
    assert pool.used == 0


def test_a_block_with_one_user_is_written_where_it_is() -> None:
    pool = BlockPool(1, 64)
    cache = KVCache(pool)
    turn = sequence("a", seed=1, length=SHARED + 5)
    cache.begin(turn)
    write(pool, turn.block_table, turn.ids, 0)
    before = list(turn.block_table)
    cache.keep(turn)
    after = TokenSequence(key="a", ids=np.concatenate([turn.ids, np.arange(3, dtype=np.int32)]))
    assert cache.begin(after) == len(turn.ids) - 1
    assert after.block_table == before and [pool.users[block] for block in before] == [1, 1, 1]


async def test_the_youngest_is_preempted_and_the_oldest_never() -> None:
    scheduler = Scheduler(KVCache(BlockPool(1, 3)), 3, 3)
    future = asyncio.get_running_loop().create_future()
    more: dict[str, Any] = {
        "sampling": Sampling(),
        "future": future,
        "uniforms": [],
        "started": 0.0,
    }
    requests = [
        Request(key=str(n), ids=np.arange(BLOCK, dtype=np.int32) + 1000 * n, order=n, **more)
        for n in (1, 0, 2)
    ]
    for request in requests:
        assert scheduler.begin(request) == 0
        request.out.append(7)
    scheduler.reserve()
    assert [request.key for request in scheduler.running] == ["0"]
    assert [request.key for request in scheduler.preempted] == ["2", "1"]
    assert scheduler.preemptions == 2 and len(requests[1].block_table) == 2
