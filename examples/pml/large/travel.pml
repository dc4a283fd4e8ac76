<!-- A guide of several cities, of which a prompt imports one, and what there is to say about any of them. -->
<schema name="travel">
  <system>Answer from the notes.</system>
  <union>
    <module name="lisbon">
      <system>
        Notes: Joe likes beans. Gina likes onions. Earl visits Madrid. Vera likes rice. Leo likes onions. Ann visits
        Lisbon. Ray visits Rome. Kate visits Paris. Walt visits London. Rita likes rice. Dan visits Vienna. Pam likes
        bread. Hugo visits Oslo. Mary likes onions. Glen visits Rome. Omar likes plums. June visits Boston. Art likes
        soup. Ann likes figs. Ella visits Havana. Nate likes lemons. Ned likes cherries. Mia visits Lisbon. Paul
        visits Lisbon. Kim visits Havana. Ada visits Prague. Fay likes bread. Hope visits Tokyo. Tess likes olives.
        Eli visits Cairo. Olga visits Dublin. Nina likes beans. Ira visits Boston. Lou likes bread. Gail likes melons.
        Fred visits Lisbon. Otto likes nuts. Jane likes bread. Sara visits Dublin. Mark likes lemons. Cora likes
        grapes. Rosa visits London.
      </system>
    </module>
    <module name="oslo">
      <system>
        Notes: Ella likes figs. Tess visits Prague. Earl likes peas. Ava likes melons. Joe likes mint. Ann visits
        Oslo. Kim visits Cairo. Lena likes figs. Rita likes figs. Cora visits Lisbon. Otto visits Rome. Hope visits
        Cairo. Ben likes figs. Eve visits London. Hugo visits Delhi. Art likes melons. Finn visits Lima. Cleo likes
        peas. Ann likes soup. Paul visits Geneva. Glen likes apples. Pia visits Prague. Omar visits Delhi. Rosa visits
        Paris. Sara likes grapes. Max likes corn. Carl likes bread. Jack likes peas. Nora visits Athens. Ruth visits
        Prague. Jane visits Seoul. Iris likes eggs. Ira visits Boston. Bob visits Rome. Nate likes plums. Pam visits
        Madrid. Ned likes soup. Lou visits Prague. Mary likes honey. June likes plums. Olga likes lemons. Gail visits
        Dublin.
      </system>
    </module>
    <module name="tokyo">
      <system>
        Notes: Ben visits Paris. Eve likes plums. Cleo likes lemons. Mia likes peas. Cora visits Berlin. Ann visits
        Tokyo. Kate likes olives. Jane visits Dublin. Sara likes grapes. Walt likes grapes. Max likes figs. Ella
        visits Dublin. Gina visits Seoul. Kurt likes beans. Ken likes cheese. Hugo likes eggs. Nina visits Cairo. Tina
        visits Berlin. Ann likes rice. Kim visits Delhi. Ida likes bread. Glen visits Cairo. Vera visits Delhi. Ivan
        likes peas. Lou likes olives. Leo visits Prague. Lena likes eggs. Fay visits Vienna. Omar visits Seoul. Finn
        visits Rome. Mark likes peas. Gail visits Athens. Ava visits Rome. Hal visits Vienna. Bob likes apples. Ira
        visits London. Sam visits Prague. Nate likes peas. Tess visits Seoul. Ada likes soup. Fred likes olives. Ned
        likes soup.
      </system>
    </module>
    <module name="lima">
      <system>
        Notes: Cleo likes figs. Earl visits Lisbon. Omar visits Berlin. Sara visits Vienna. Iris visits Dublin. Ann
        visits Lima. Jack likes apples. Sam likes onions. Rosa visits Berlin. Mary visits London. Gail likes eggs.
        Kurt visits Geneva. Eve likes grapes. Vera likes beans. Leo likes eggs. Eli likes peas. Ned visits Oslo. Fred
        likes peas. Ann likes corn. Ada visits Delhi. Dora visits Athens. Lisa visits Cairo. Tina likes peas. Ben
        visits Paris. Lou visits Havana. Tess visits Cairo. Pam visits Seoul. Nate likes peas. Max likes olives. Mia
        likes honey. June likes grapes. Fay likes olives. Glen visits Rome. Olga visits Lima. Otto visits Dublin. Finn
        visits Lisbon. Pia likes apples. Kate likes corn. Ava likes plums. Dan likes apples. Ruth likes melons. Paul
        visits Lima.
      </system>
    </module>
  </union>
  <module name="bags">
    <system>
      Notes: Nate has 3 red boats. Ava has 4 orange cups. Jack has 3 gold forks. Eve has 9 brown boats. Leo has 12 red
      bags. Ken has 10 orange masks. Iris has 9 white kites. Ivan has 9 blue bowls. Jane has 10 brown drums. Carl has
      12 brown drums. Pia has 9 white flags. Cora has 3 white masks. Paul has 5 black bowls. Ray has 12 gray chairs.
      Mark has 8 blue chairs. Nina has 12 white dolls. Nora has 2 purple bags. Tina has 12 black drums. Max has 11
      green hats. Dora has 6 orange bowls. Mia has 6 purple balls. June has 4 red chairs. Otto has 2 gray rings. Ben
      has 12 blue boots. Omar has 5 orange chairs. Lisa has 6 silver clocks. Gail has 6 gray pens. Kim has 9 blue
      ropes. Cleo has 10 black stamps. Sam has 3 gray kites.
    </system>
  </module>
</schema>
