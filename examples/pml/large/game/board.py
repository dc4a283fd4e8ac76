"""Where units can go."""

from collections import deque
from collections.abc import Iterator

Place = tuple[int, int]


class Board:
    def __init__(self, rows: list[str]) -> None:
        self.rows = rows

    def free(self, place: Place) -> bool:
        x, y = place
        return 0 <= y < len(self.rows) and 0 <= x < len(self.rows[y]) and self.rows[y][x] != "#"

    def beside(self, place: Place) -> Iterator[Place]:
        x, y = place
        for step in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
            if self.free(step):
                yield step

    def way(self, start: Place, end: Place) -> list[Place] | None:
        """The shortest way, both ends included; None if there is none."""
        came: dict[Place, Place | None] = {start: None}
        waiting = deque([start])
        while waiting:
            place = waiting.popleft()
            if place == end:
                found = [place]
                while (before := came[found[-1]]) is not None:
                    found.append(before)
                return found[::-1]
            for step in self.beside(place):
                if step not in came:
                    came[step] = place
                    waiting.append(step)
        return None
