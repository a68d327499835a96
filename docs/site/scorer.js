// How the search ranks: the page that a word is an index entry of comes first, and pages that mention everything last.
const PLACES = [
  [/^(reference\/messages|architecture|internals\/)/, -4],
  [/^(how_to|troubleshooting|benchmarks\/|explanation\/)/, -2],
  [/^(guides\/|start|tutorials\/)/, 2],
];

var Scorer = {
  score: (result) => {
    const [docname, , , , score, , kind] = result;
    if (kind === "index") {
      // Without its anchor, so that the page isn't listed again for its text.
      result[2] = "";
      return score + 100;
    }
    const place = kind === "object" ? undefined : PLACES.find(([pattern]) => pattern.test(docname));
    return score + (place ? place[1] : 0);
  },
  // As they are in Sphinx, which takes all of these from here or none.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
