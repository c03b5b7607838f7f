// A paragraph of two sentences. The second one names gone_function() and goes. A third, or with USE_OTHER a fourth.
// USE_THIS: a condition that is met goes from its start. USE_OTHER=1: one that is not met takes its sentence with it.
//
// Nothing is left of a paragraph about gone_name.
//
//   kept     a row of a table; with gone_name a second part
//   other    a row about gone_name, which
//            goes on here
//   last     a row
int kept(int number);  // of each; USE_OTHER: of none
int last;              // USE_THIS=1: set
int other;             // GONE_WORD
// ---- a title with gone_name ----
// SIZE=4: as here. SIZE=8: twice as much. The sinks go. WGMMA and PTX are no names.
// Kept: a clause; with gone_name a second one; this is about the second one, and goes with it. Kept as well.
int SIZE = 4;
// ======== becomes
// A paragraph of two sentences. A third. A condition that is met goes from its start.
//
//   kept     a row of a table
//   last     a row
int kept(int number);  // of each
int last;              // set
int other;
// ---- a title with gone_name ----
// As here. WGMMA and PTX are no names. Kept: a clause. Kept as well.
int SIZE = 4;
