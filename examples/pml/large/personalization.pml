<!-- What is known about a reader, in one module for each trait: a prompt picks one member of each union. -->
<schema name="personalization">
  <system>Answer from the notes.</system>
  <union>
    <module name="sweet">
      <system>
        Notes: Sam likes melons. Hope likes nuts. Ivan likes grapes. Lou likes beans. Vera likes grapes. Kim likes
        cheese. Art likes beans. Ned likes honey. Rosa likes cherries. Nora likes figs. Walt likes grapes. Omar likes
        nuts. Carl likes peas. Mia likes honey. Pam likes lemons. Glen likes eggs. Max likes melons. Kurt likes nuts.
        Gina likes apples. Ava likes mint. Mary likes plums. Iris likes plums. Earl likes eggs. Ray likes bread. Tess
        likes beans. Nate likes nuts. Otto likes olives. Eli likes soup. Paul likes cherries.
      </system>
    </module>
    <module name="sour">
      <system>
        Notes: Earl likes lemons. Nora likes beans. Ray likes onions. Ann likes grapes. Eli likes rice. Lou likes
        melons. Nate likes cherries. Sam likes peas. Hope likes peas. Ada likes eggs. Rita likes bread. Dan likes
        grapes. Ivan likes figs. Max likes mint. Vera likes mint. Pia likes olives. Glen likes nuts. Hugo likes honey.
        Mia likes lemons. Jack likes apples. Bob likes cherries. Art likes beans. Lisa likes nuts. Carl likes onions.
        Fred likes rice. Mark likes onions. Kim likes apples. Ned likes bread. Ida likes mint.
      </system>
    </module>
    <module name="plain">
      <system>
        Notes: Paul likes bread. Vera likes grapes. Lou likes figs. Olga likes nuts. Ann likes melons. Earl likes
        figs. Hugo likes onions. June likes beans. Kim likes lemons. Hal likes nuts. Iris likes melons. Ella likes
        mint. Ava likes eggs. Glen likes apples. Tina likes honey. Ida likes peas. Dora likes bread. Ira likes eggs.
        Otto likes onions. Mia likes bread. Joe likes eggs. Fred likes honey. Hope likes eggs. Ray likes figs. Lisa
        likes olives. Nina likes figs. Leo likes grapes. Eli likes honey. Kate likes cheese.
      </system>
    </module>
  </union>
  <union>
    <module name="north">
      <system>
        Notes: Joe visits Geneva. Fred visits London. Ivan visits Madrid. Fay visits Prague. Finn visits Athens. Walt
        visits Oslo. Mia visits Oslo. Mark visits Havana. Ida visits Milan. Ben visits Berlin. Hope visits Milan. Carl
        visits Berlin. Kate visits Paris. Gail visits Boston. Otto visits Berlin. Mary visits Lima. Pam visits Geneva.
        Ruth visits Boston. Gina visits Vienna. Cora visits London. Sara visits Madrid. Ada visits Lima. Ned visits
        London. Omar visits Vienna. Tess visits Berlin. Leo visits Lima. Kim visits London. Nora visits Lima. Kurt
        visits Lisbon.
      </system>
    </module>
    <module name="south">
      <system>
        Notes: Kim visits Lima. Gail visits Tokyo. Hope visits Lima. Nora visits Madrid. Paul visits Lima. Ben visits
        Lima. Nate visits Geneva. Tina visits Paris. Leo visits Havana. Iris visits Dublin. Rita visits Havana. Hal
        visits Havana. Olga visits Delhi. Cleo visits Lisbon. Vera visits Tokyo. Jack visits Geneva. Tess visits
        London. Sam visits Boston. Rosa visits Milan. Mia visits Athens. Max visits Lima. Ava visits Havana. Sara
        visits Rome. Lena visits Rome. Kurt visits Havana. Ken visits Cairo. Fred visits Paris. Omar visits Berlin.
        Walt visits Cairo.
      </system>
    </module>
  </union>
  <union>
    <module name="reader">
      <system>
        Notes: Ira has 8 silver rings. Paul has 8 white belts. Fred has 6 gold boats. Iris has 6 silver balls. Sara
        has 7 gold shells. Nora has 2 pink bags. Ivan has 5 gold bowls. Rita has 8 black kites. Omar has 8 green
        shells. Mia has 12 brown books. Mark has 3 blue keys. Fay has 11 pink pens. Ken has 4 green kites. Jane has 2
        brown lamps. Tina has 12 gold drums. Olga has 11 purple tents. Max has 7 silver clocks. Ida has 4 green cups.
        June has 6 green clocks. Ned has 4 blue bells. Bob has 8 gray dolls. Nate has 5 white lamps. Lena has 2 gray
        hats. Dora has 2 purple tents. Lou has 12 gold drums. Joe has 11 silver forks. Glen has 4 orange flags. Kim
        has 5 purple keys. Gina has 11 black forks.
      </system>
    </module>
    <module name="player">
      <system>
        Notes: Cora has 3 silver hats. Ava has 10 blue boats. Lou has 10 gold bags. Pia has 4 red gloves. Sara has 3
        purple bowls. Ruth has 3 black lamps. Ben has 9 white flags. Hal has 4 orange flags. Tina has 5 blue forks.
        Earl has 7 purple dolls. Carl has 6 green hats. Fred has 11 white ropes. Nina has 9 green rings. Gail has 10
        gray coins. Mia has 3 orange drums. Ann has 11 white stones. Otto has 10 black hats. June has 7 red coins. Sam
        has 4 gold books. Pam has 12 white belts. Kate has 7 gold books. Rita has 6 blue dolls. Ned has 10 red bags.
        Jack has 7 gray maps. Kim has 10 purple boots. Mark has 3 white maps. Walt has 12 gold bowls. Ada has 7 white
        keys. Bob has 7 purple lamps.
      </system>
    </module>
  </union>
  <module name="rest" confidential="true">
    <system>
      Notes: Vera has 4 silver coins.
    </system>
  </module>
</schema>
