<prompt schema="code-generation">
  <unit/>
  <owners/>
  <user>What does Pia have?</user>
</prompt>
