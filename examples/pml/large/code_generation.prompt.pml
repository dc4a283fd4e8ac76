<prompt schema="code-generation">
  <unit/>
  <player/>
  <game/>
  <user>Write a player that only runs away.</user>
</prompt>
