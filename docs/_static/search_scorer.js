// The order in which the search of this site shows what it finds.
//
// Sphinx finds the pages that have all words of a query, and gives each the score of its best word.
// So all pages with one of the words in any heading are equal, and come by the alphabet. Here those
// come first that have most of the words in their title and their headings, or the query as a
// heading. Pages that say how to do something come before records of decisions and the changelog.

const PLACES = [
  [/^(index|tutorial|how-to\/)/, 6],
  [/^(reference|explanation)\//, 3],
  [/^(decisions\/|changelog$)/, -40],
];
const BY_HEADING = 25; // the query is a heading, or most of one
const IN_TITLE = 30; // all words of the query are in the page's title
const IN_HEADINGS = 20; // all words of the query are in its headings

let asked = null; // the query of this page, as stems, once it is known

function stemsAsked() {
  if (asked === null) {
    const query = new URLSearchParams(window.location.search).get("q") || "";
    asked = [...Search._parseQuery(query)[1]];
  }
  return asked;
}

// Return the share of the words, from 0 to 1, that satisfy a condition.
function share(words, condition) {
  return words.length ? words.filter(condition).length / words.length : 0;
}

function wordsInPage(docname) {
  const index = Search._index;
  const page = index.docnames.indexOf(docname);
  const stemmer = new Stemmer();
  const title = splitQuery(index.titles[page].toLowerCase()).map((word) => stemmer.stemWord(word));
  const inHeadings = (word) =>
    Object.hasOwn(index.titleterms, word) && [index.titleterms[word]].flat().includes(page);
  const words = stemsAsked();
  return (
    IN_TITLE * share(words, (word) => title.includes(word)) +
    IN_HEADINGS * share(words, inHeadings)
  );
}

var Scorer = {
  score: ([docname, title, anchor, description, score, filename, kind]) => {
    const place = PLACES.find(([pattern]) => pattern.test(docname));
    const byHeading = kind === "title" ? BY_HEADING : 0;
    return score + byHeading + wordsInPage(docname) + (place ? place[1] : 0);
  },
  // What Sphinx has where a site has no scorer.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
