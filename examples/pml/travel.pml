<!-- A guide of several cities, of which a prompt imports one, and what there is to say about any of them. -->
<schema name="travel">
  <system>Answer from the notes.</system>
  <union>
    <module name="lisbon">
      <system>Notes: Ann visits Lisbon. Ann likes figs. Bob visits Rome. Dan has 4 red maps. Eve has 2 black boots.</system>
    </module>
    <module name="oslo">
      <system>Notes: Ann visits Oslo. Ann likes soup. Bob visits Lima. Dan has 2 blue boots.</system>
    </module>
    <module name="tokyo">
      <system>Notes: Ann visits Tokyo. Ann likes rice. Bob visits Seoul. Dan has 6 white cups.</system>
    </module>
  </union>
  <module name="bags">
    <system>Notes: Ann has 7 green bags. Bob has 3 gold keys. Finn has 5 black hats.</system>
  </module>
</schema>
