<!--
  A plan with parameters: their arguments are encoded with the prompt, in the places that are held for them. What follows
  a parameter was encoded before its argument was known: so let each stand where a sentence ends.
-->
<schema name="trip-plan">
  <system>Answer from the notes.</system>
  <module name="plan">
    <system>
      Notes: Walt visits Oslo. Kim likes grapes. Cleo has 6 red boats. Leo has 12 red ropes. Finn has 5 brown stones.
      Earl has 12 white keys. Iris has 10 red keys. Kate has 7 purple bags. Ella has 12 brown ropes. Lena visits
      Seoul. Cora has 11 green clocks. Jane likes grapes. Vera has 2 blue kites. Pam likes cheese. Ira likes lemons.
      Jack likes beans. Ida has 12 brown bags. Paul visits Prague. Nora visits Havana. Mia visits Athens. Hope has 11
      brown belts. Mark visits Paris. Olga likes grapes. Sam likes plums. Rosa likes cheese. Ivan has 10 silver
      chairs. Sara visits Milan. Tina visits Boston. Pia has 5 green ropes. Art visits Dublin. June has 2 red boats.
      Lisa has 4 black books. Bob has 12 green gloves. Ken likes figs. Ruth has 11 gray stones. Ned has 5 green
      shells. Gail has 6 blue stamps. Eve has 12 gold forks. Dan likes beans. Nina visits Paris.
      Ann visits <parameter name="city" length="1"/>. Ann likes <parameter name="food" length="1"/>.
    </system>
    <union>
      <module name="by-boat">
        <system>
          Notes: Fay has 3 orange coins. Fred has 6 pink hats. Art has 8 white kites. Sam has 7 white tents. Kim has 6
          red boots. Hugo has 3 blue boats. Mark has 7 pink dolls. Lou has 11 brown chairs. Mary has 6 purple bowls.
          Ben has 2 gold kites. Paul has 8 brown dolls. Rosa has 3 pink chairs. Ira has 2 brown balls. Dan has 5
          silver gloves. Sara has 3 purple forks. Hal has 6 green shells. Ken has 2 brown coins. Dora has 6 red kites.
          Jack has 7 gray bells. Eli has 9 silver flags.
        </system>
      </module>
      <module name="on-foot">
        <system>
          Notes: Sam has 9 green maps. Carl has 11 silver dolls. Hal has 11 orange boats. Gina has 7 purple hats. Hugo
          has 8 brown boots. Lena has 10 green gloves. Nina has 9 orange maps. Art has 7 green pens. Fay has 9 silver
          dolls. Nora has 6 purple masks. Walt has 4 pink pens. Ben has 12 silver masks. Fred has 10 black rings. Paul
          has 6 silver forks. Dora has 11 green bowls. Tina has 4 black bowls. Nate has 7 purple clocks. Ava has 7
          green masks. Ken has 7 black rings. Lou has 3 green belts.
        </system>
      </module>
    </union>
  </module>
</schema>
