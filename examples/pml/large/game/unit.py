"""Units on a board."""

from dataclasses import dataclass


@dataclass
class Unit:
    name: str
    x: int
    y: int
    health: int = 9
    reach: int = 2

    @property
    def alive(self) -> bool:
        return self.health > 0

    def distance(self, other: "Unit") -> int:
        return max(abs(self.x - other.x), abs(self.y - other.y))

    def can_hit(self, other: "Unit") -> bool:
        return other is not self and self.alive and other.alive and self.distance(other) <= self.reach
