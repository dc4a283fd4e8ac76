<prompt schema="trip-plan">
  <plan city="Lisbon" food="figs"><by-boat/></plan>
  <user>What does Ann visit?</user>
</prompt>
