<!-- A program's source files, as modules: a prompt imports those that its task is about. -->
<schema name="code-generation">
  <system>You write Python. Some files of the program:</system>
  <module name="unit"><system src="game/unit.py"/></module>
  <module name="board"><system src="game/board.py"/></module>
  <module name="player"><system src="game/player.py"/></module>
  <module name="game"><system src="game/game.py"/></module>
</schema>
