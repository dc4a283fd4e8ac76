"""Players in turn, until one is left."""

from board import Board
from player import Player


class Game:
    def __init__(self, board: Board, players: list[Player]) -> None:
        self.board = board
        self.players = players

    def others(self, player: Player) -> list:
        return [unit for other in self.players if other is not player for unit in other.living()]

    def round(self) -> int:
        return sum(player.turn(self.board, self.others(player)) for player in self.players if player.living())

    def winner(self, most_rounds: int = 100) -> Player | None:
        for _ in range(most_rounds):
            left = [player for player in self.players if player.living()]
            if len(left) < 2:
                return left[0] if left else None
            self.round()
        return None
