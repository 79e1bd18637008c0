"""accept_and_advance_ against the rule written as a Python loop."""

import pytest
import torch

from graphengine.kernels.accept import (
    MAX_BLOCK_LENGTH,
    NUM_RESULTS,
    accept_and_advance_,
    count_accepted,
    next_block,
)

MASK = 99
POISON = -7
STEP = (1 << 31) - 6


def plain_accept(draft, target, start, table, S):
    """(start, block, positions, slots, accepted) of one live request, by the definition."""
    accepted = 0
    while accepted < len(draft) - 1 and draft[accepted + 1] == target[accepted]:
        accepted += 1
    start += accepted + 1
    positions = [start + i for i in range(len(draft))]
    slots = [table[p // S] * S + p % S if p // S < len(table) else 0 for p in positions]
    return start, [max(target[accepted], 0)] + [MASK] * (len(draft) - 1), positions, slots, accepted


def run(device, draft, target, start, table, S, step=STEP):
    B, G = draft.shape
    state = {
        "start": start.to(torch.int32),
        "table": table.to(torch.int32),
        "block": torch.full((B, G), POISON),
        "positions": torch.arange(B * G) + 10_000,
        "slots": torch.arange(B * G) + 20_000,
        "context_positions": torch.full((B * G,), POISON),
        "context_slots": torch.full((B * G,), POISON),
        "step": torch.full((B,), step),
    }
    state = {name: x.to(device) for name, x in state.items()}
    # As in the engine: rows of a longer block's length, in memory of the host.
    words = torch.full((B, NUM_RESULTS * (G + 3)), POISON)
    state["words"] = words.pin_memory() if device == "cuda" else words
    accept_and_advance_(
        draft.to(device), target.to(device), *state.values(), mask_token_id=MASK, page_size=S
    )
    if device == "cuda":
        torch.cuda.synchronize()
    state = {name: x.cpu() for name, x in state.items()}
    begin = step % NUM_RESULTS * (G + 1)
    own = state["words"][:, begin : begin + G + 1]
    assert (own >> 32 == step).all()
    assert (state["words"] == POISON).sum() == state["words"].numel() - own.numel()
    return state | {"targets": own.int()[:, :G], "accepted": own.int()[:, G]}


def check(device, draft, target, start, table, S) -> None:
    B, G = draft.shape
    got = run(device, draft, target, start, table, S)
    for b in range(B):
        rows = slice(b * G, b * G + G)
        if start[b] == 0:
            expected = (0, [POISON] * G, [0] * G, [0] * G, 0)
        else:
            expected = plain_accept(
                draft[b].tolist(), target[b].tolist(), int(start[b]), table[b].tolist(), S
            )
        assert int(got["start"][b]) == expected[0]
        assert got["block"][b].tolist() == expected[1]
        assert got["positions"][rows].tolist() == expected[2]
        assert got["slots"][rows].tolist() == expected[3]
        assert int(got["accepted"][b]) == expected[4]
    assert got["targets"].tolist() == target.tolist()
    assert got["context_positions"].tolist() == list(range(10_000, 10_000 + B * G))
    assert got["context_slots"].tolist() == list(range(20_000, 20_000 + B * G))
    assert got["step"].tolist() == [STEP + 1] * B


@pytest.mark.parametrize("G", [1, 2, 5, 16, 32])
def test_every_number_accepted(device, G) -> None:
    """Bug: off by one at 0 or at G-1, or a match after the first mismatch counted."""
    target = torch.randint(0, 50, (G, G))
    draft = torch.cat((torch.full((G, 1), 3), target[:, :-1]), dim=1)
    for b in range(G - 1):
        draft[b, b + 1] += 1000  # row b accepts exactly b; the last row accepts all
    start = torch.arange(1, G + 1)
    table = torch.randint(1, 500, (G, 40))
    assert count_accepted(draft, target).tolist() == list(range(G))
    check(device, draft, target, start, table, 4)


@pytest.mark.parametrize("S", [1, 3, 16])
@pytest.mark.parametrize("G", [1, 4, 7])
def test_random_rows_with_padding_and_page_edges(device, G, S) -> None:
    """Bug: a padded row that advances, a slot from the neighbour's page table, a page edge."""
    B, W = 11, 6
    generator = torch.Generator().manual_seed(G * S)
    draft = torch.randint(0, 2, (B, G), generator=generator)
    target = torch.randint(0, 2, (B, G), generator=generator)
    table = torch.randint(1, 500, (B, W), generator=generator)
    for first in range(0, 3 * S + 2, 1 + S // 4):
        start = first + torch.arange(B)
        start[[0, 4, 10]] = 0
        check(device, draft, target, start, table, S)


def test_past_the_end_of_the_table(device) -> None:
    """Bug: a position past the last page reads another request's page or out of bounds."""
    draft, target = torch.tensor([[1, 5, 6, 7]] * 2), torch.tensor([[5, 6, 7, 8]] * 2)
    check(device, draft, target, torch.tensor([5, 400]), torch.tensor([[9, 8], [7, 6]]), 4)


def test_the_draft_may_be_the_block_itself(device) -> None:
    """Bug: the block overwritten while the draft in the same memory is still being compared."""
    target = torch.tensor([[5, 6, 7, 8]], device=device)
    block = torch.tensor([[1, 5, 6, 0]], device=device)
    start = torch.tensor([3], dtype=torch.int32, device=device)
    table = torch.tensor([[4, 2]], dtype=torch.int32, device=device)
    rows = positions, slots, *_ = tuple(torch.zeros(4, 4, dtype=torch.int64, device=device))
    step, words = torch.zeros(1, 11, dtype=torch.int64, device=device).split((1, 10), dim=1)
    state: list[torch.Tensor] = [start, table, block, *rows, step[0], words]
    accept_and_advance_(block, target, *state, mask_token_id=MASK, page_size=8)
    assert words[0].tolist() == [5, 6, 7, 8, 2, *[0] * 5]
    assert block.tolist() == [[7, MASK, MASK, MASK]]
    assert positions.tolist() == [6, 7, 8, 9]
    assert slots.tolist() == [38, 39, 16, 17]


def test_next_block_is_where_accept_goes(device) -> None:
    """Bug: the engine's own set-up of a batch and the device's advance disagree."""
    B, G, S = 4, 5, 4
    draft, target = torch.randint(0, 2, (B, G)), torch.randint(0, 2, (B, G))
    start, table = torch.tensor([3, 0, 9, 15]), torch.randint(1, 50, (B, 5))
    got = run(device, draft, target, start, table, S)
    bonus = target.gather(1, got["accepted"].long()[:, None])[:, 0]
    ids, positions, slots = next_block(got["start"], bonus, got["table"], G, MASK, S)
    live = start > 0
    assert torch.equal(ids[live], got["block"][live])
    assert torch.equal(positions, got["positions"])
    assert torch.equal(slots, got["slots"])
    assert ids.dtype == positions.dtype == slots.dtype == torch.int64


def test_ids_that_are_none(device) -> None:
    """Bug: -1, the answer to logits that are not finite, counts as a match or becomes the anchor,
    and the next step looks up row -1 of the embedding."""
    G = 4
    target = torch.tensor([[-1, 6, 7, 8], [5, -1, 7, 8], [5, 6, 7, -1], [-1, -1, -1, -1]])
    draft = torch.tensor([[1, 5, 6, 7]] * 4)
    start, table = torch.tensor([3, 5, 7, 0]), torch.randint(1, 50, (4, 5))
    check(device, draft, target, start, table, 4)
    got = run(device, draft, target, start, table, 4)
    assert got["accepted"].tolist() == [0, 1, 3, 0]
    assert got["block"][:, 0].tolist() == [0, 0, 0, POISON]
    ids, _, _ = next_block(got["start"], torch.tensor([-1, 3, -9, 0]), got["table"], G, MASK, 4)
    assert ids[:, 0].tolist() == [0, 3, 0, 0]


def test_rows_of_wider_tensors(device) -> None:
    """Bug: one tensor's rows are found by another's stride: drafts are compared with another
    request's targets, or a block is written to its pages."""
    B, G, W, S = 3, 4, 5, 4
    torch.manual_seed(0)
    dense = {"draft": torch.randint(0, 2, (B, G)), "target": torch.randint(0, 2, (B, G))}
    dense |= {"start": torch.tensor([3, 0, 9], dtype=torch.int32)}
    dense |= {"table": torch.randint(1, 99, (B, W), dtype=torch.int32), "block": torch.zeros(B, G)}
    dense |= {name: torch.zeros(B * G) for name in ("positions", "slots", "earlier", "their_slots")}
    dense |= {"step": torch.full((B,), STEP), "results": torch.zeros(B, NUM_RESULTS * (G + 1))}
    found = []
    for is_wide in (False, True):
        state = []
        for more, x in enumerate(dense.values(), 1):
            x = x.long() if x.is_floating_point() else x
            wide = torch.full((*x.shape[:-1], x.shape[-1] + more * is_wide), 1, dtype=x.dtype)
            wide[..., : x.shape[-1]] = x
            state.append(wide.to(device)[..., : x.shape[-1]])
        accept_and_advance_(*state, mask_token_id=MASK, page_size=S)
        found.append([x.tolist() for x in state])
    assert found[0] == found[1]


def test_refuses_wrong_types(device) -> None:
    """Bug: int32 ids read as int64."""
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="draft_ids is"):
        run(device, ids.int(), ids, torch.ones(2), torch.ones(2, 2), 4)
    with pytest.raises(ValueError, match="target_ids"):
        run(device, ids, ids[:, :2], torch.ones(2), torch.ones(2, 2), 4)
    with pytest.raises(ValueError, match="target_ids has strides"):
        run(device, ids, torch.zeros(3, 2, dtype=torch.int64).T, torch.ones(2), torch.ones(2, 2), 4)
    long = torch.zeros(1, MAX_BLOCK_LENGTH + 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="block length"):
        run(device, long, long, torch.ones(1), torch.ones(1, 2), 4)
    most = torch.arange(MAX_BLOCK_LENGTH)[None]
    found = run(device, most, most + 1, torch.ones(1), torch.ones(1, 2), 4)
    assert found["accepted"].tolist() == [MAX_BLOCK_LENGTH - 1]


def test_a_refusal_names_the_tensor(device) -> None:
    """Bug: whoever passes one of eleven buffers in another dtype or size looks at another one."""
    ids, rows = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    state = {"draft_ids": ids, "target_ids": ids, "start": torch.ones(2, dtype=torch.int32)}
    state |= {"page_table": torch.ones(2, 4, dtype=torch.int32), "block_ids": ids}
    state |= dict.fromkeys(("positions", "slots", "context_positions", "context_slots"), rows)
    state |= {"step": rows[:2], "results": torch.zeros(2, NUM_RESULTS * 4, dtype=torch.int64)}
    for name in state:
        bad = state | {name: state[name].double()}
        with pytest.raises(ValueError, match=f"^{name} is torch.float64"):
            accept_and_advance_(
                *(x.to(device) for x in bad.values()), mask_token_id=MASK, page_size=4
            )


def test_refuses_room_for_one_step_alone(device) -> None:
    """Bug: every other step's results are stored behind a row that holds one step's."""
    state: list[torch.Tensor] = [torch.zeros(2, 3, dtype=torch.int64, device=device)] * 2
    state += [torch.ones(2, dtype=torch.int32, device=device)]
    state += [torch.ones(2, 4, dtype=torch.int32, device=device), state[0]]
    state += [torch.zeros(6, dtype=torch.int64, device=device)] * 4
    words = torch.zeros(3, NUM_RESULTS * 4 - 1, dtype=torch.int64, device=device)
    state += [words[0, :2], words[:2]]
    with pytest.raises(ValueError, match="results is"):
        accept_and_advance_(*state, mask_token_id=MASK, page_size=4)


@pytest.mark.parametrize("step", [1, 2, (1 << 31) - 1, 1 << 31, (1 << 40) + 3])
def test_results_of_a_step(device, step) -> None:
    """Bug: a step writes over the results of the one before, which the host still reads, or the
    number above a negative id is another; or a number past 32 bits spoils the value."""
    target, draft = torch.tensor([[-1, 6, 150_000]]), torch.tensor([[1, 5, 6]])
    state = torch.tensor([3]), torch.ones(1, 4, dtype=torch.int64)
    got = {n: run_words(device, draft, target, *state, n) for n in (step, step + 1)}
    for n, words in got.items():
        begin = n % NUM_RESULTS * 4
        own = words[0, begin : begin + 4]
        assert own.to(torch.int32).tolist() == [-1, 6, 150_000, 0]
        assert (own >> 32).tolist() == [(n + 2**31) % 2**32 - 2**31] * 4
        assert words[0].tolist().count(POISON) == words.numel() - 4


def run_words(device, draft, target, start, table, step):
    G = draft.shape[1]
    block, *rows = torch.zeros(5, G, dtype=torch.int64, device=device)
    words = torch.full((1, NUM_RESULTS * (G + 1)), POISON, device=device)
    state = [start.int(), table.int(), block[None], *rows, torch.tensor([step]), words]
    accept_and_advance_(
        *(x.to(device) for x in (draft, target, *state)), mask_token_id=MASK, page_size=4
    )
    return words.cpu()
