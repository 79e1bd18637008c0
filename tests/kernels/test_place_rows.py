"""place_rows_ against a loop over a chunk's rows, one by one."""

import pytest
import torch

from graphengine.kernels.place_rows import Placed, place_rows_, place_rows_reference_

SHAPES = [(1, 16, 1, 3, 5), (4, 16, 3, 300, 16), (3, 128, 1, 40, 16), (2, 64, 2, 6, 128)]


def of(ints: list[list[int]] | list[int], device: str) -> torch.Tensor:
    return torch.tensor(ints, dtype=torch.int32, device=device)


@pytest.mark.parametrize("place_", [place_rows_, place_rows_reference_], ids=["launched", "torch"])
@pytest.mark.parametrize(("blocks", "rows", "prompts", "width", "page_size"), SHAPES)
def test_every_row_is_where_its_prompt_is(
    device, place_, blocks: int, rows: int, prompts: int, width: int, page_size: int
) -> None:
    """Bug: a row behind a prompt's end has a position, a block without a prompt writes to a page
    that is somebody's, a row past the table reads the next prompt's pages, or the table's last
    columns are an earlier chunk's."""
    generator = torch.Generator().manual_seed(blocks)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    pages = [[draw(1, 5000) for _ in range(width)] for _ in range(prompts)]
    for last_start in (-1, 0, width * page_size - rows // 2):
        starts = [draw(0, width * page_size - rows) for _ in range(blocks - 1)] + [last_start]
        ends = [draw(max(s, 0), s + rows) + 1 if s >= 0 else 0 for s in starts]
        owners = [draw(0, prompts) for _ in range(blocks)]
        ids = [draw(0, 99) for _ in range(blocks * rows)]
        lasts = [draw(0, blocks * rows) for _ in range(prompts)]
        one_each = of([-7] * (blocks * rows), device).long()
        placed = Placed(
            one_each,
            one_each.clone(),
            one_each.clone(),
            of([[-7] * width] * blocks, device),
            of([-7] * prompts, device).long(),
        )
        sent = [of(x, device) for x in (ids, starts, ends, owners, lasts, pages)]
        place_(*sent, page_size, placed)
        positions, slots = [], []
        for start, end, owner in zip(starts, ends, owners, strict=True):
            for at in range(start, start + rows):
                has_page = start >= 0 and at < width * page_size
                positions.append(at if has_page and at < end else 0)
                page = pages[owner][at // page_size] if has_page else 0
                slots.append(page * page_size + at % page_size if has_page else 0)
        assert placed.ids_n.tolist() == ids and placed.last_R.tolist() == lasts
        assert placed.positions_n.tolist() == positions
        assert placed.slots_n.tolist() == slots
        assert placed.table_BW.tolist() == [pages[owner] for owner in owners]


def test_refuses_blocks_it_has_no_tile_for(device) -> None:
    ids, block, pages = of([0] * 48, device), of([0] * 2, device), of([[1]], device)
    placed = Placed(ids.long(), ids.long(), ids.long(), block, block)
    with pytest.raises(ValueError, match="48 rows in 2 blocks"):
        place_rows_(ids, block, block, block, block, pages, 16, placed)
