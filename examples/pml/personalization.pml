<!-- What is known about a reader, in one module for each trait: a prompt picks one member of each union. -->
<schema name="personalization">
  <system>Answer from the notes.</system>
  <union>
    <module name="sweet"><system>Notes: Mia likes honey. Mia has 9 gold bowls.</system></module>
    <module name="sour"><system>Notes: Mia likes lemons. Mia has 2 gray bowls.</system></module>
    <module name="plain"><system>Notes: Mia likes bread. Mia has 5 white bowls.</system></module>
  </union>
  <union>
    <module name="north"><system>Notes: Mia visits Oslo. Otto visits Dublin.</system></module>
    <module name="south"><system>Notes: Mia visits Athens. Otto visits Lisbon.</system></module>
  </union>
  <union>
    <module name="reader"><system>Notes: Otto has 12 brown books. Otto likes grapes.</system></module>
    <module name="player"><system>Notes: Otto has 3 orange drums. Otto likes nuts.</system></module>
  </union>
  <module name="rest" confidential="true"><system>Notes: Vera has 4 silver coins.</system></module>
</schema>
