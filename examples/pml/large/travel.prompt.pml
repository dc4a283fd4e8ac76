<prompt schema="travel">
  <oslo/>
  <bags/>
  <user>What does Ann like?</user>
</prompt>
