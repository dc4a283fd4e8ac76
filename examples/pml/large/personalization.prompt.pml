<prompt schema="personalization">
  <sour/>
  <south/>
  <player/>
  <user>What does Mia visit?</user>
</prompt>
