<!-- Source files as modules. Code is full of angle brackets and ampersands: CDATA takes it to the letter. -->
<schema name="code-generation">
  <system>Answer from the notes.</system>
  <module name="unit">
    <system><![CDATA[std::map<int, Unit> units; bool ready = units.size() > 0 && at < 9;]]></system>
  </module>
  <module name="game">
    <system><![CDATA[template <typename T> T&& next(T&& at) { return at << 1; }]]></system>
  </module>
  <module name="page">
    <system><![CDATA[<p class="note">if (a < b && b > c) &amp; so on</p>]]></system>
  </module>
  <module name="owners">
    <system>Notes: Max has 5 blue maps. Ada has 3 red keys. Pia has 2 pink lamps.</system>
  </module>
</schema>
