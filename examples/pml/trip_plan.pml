<!--
  A plan with parameters: their arguments are encoded with the prompt, in the places that are held for them. What follows
  a parameter was encoded before its argument was known: so let each stand where a sentence ends.
-->
<schema name="trip-plan">
  <system>Answer from the notes.</system>
  <module name="plan">
    <system>Notes: Dan has 4 red maps. Ann visits <parameter name="city" length="1"/>. Ann likes <parameter name="food" length="1"/>.</system>
    <union>
      <module name="by-boat"><system>Notes: Hugo has 3 blue boats.</system></module>
      <module name="on-foot"><system>Notes: Hugo has 8 brown boots.</system></module>
    </union>
  </module>
</schema>
