"""Who moves units."""

from board import Board
from unit import Unit


class Player:
    def __init__(self, name: str, units: list[Unit]) -> None:
        self.name = name
        self.units = units

    def living(self) -> list[Unit]:
        return [unit for unit in self.units if unit.alive]

    def turn(self, board: Board, others: list[Unit]) -> int:
        """Move every unit a step towards its nearest enemy, or hit it; returns how many hits there were."""
        hits = 0
        for unit in self.living():
            enemies = sorted((other for other in others if other.alive), key=unit.distance)
            if not enemies:
                break
            if unit.can_hit(enemies[0]):
                enemies[0].health -= 3
                hits += 1
            elif way := board.way((unit.x, unit.y), (enemies[0].x, enemies[0].y)):
                unit.x, unit.y = way[1]
        return hits
