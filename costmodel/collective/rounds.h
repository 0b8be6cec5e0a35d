#pragma once
// A collective algorithm as data: rounds of sends between the ranks of a group,
// from which both its time and its result follow.

#include <vector>

namespace tessera {

// `count` chunks from rank `from` to rank `to` (positions in the group). In
// repetition t of its round the first of them is
//   base + (first + t * shift) mod modulus.
struct Send {
  int from = 0;
  int to = 0;
  int base = 0;
  int first = 0;
  int count = 1;
};

// Sends that happen at once, `repeat` times over. Repetitions differ in the
// chunks sent only, so that the n - 1 steps of a ring are one round: what a
// send brings, the receiver's send with the same base passes on in the next
// repetition.
struct Round {
  int repeat = 1;
  int shift = 0;
  int modulus = 1;
  // Whether the receiver adds what arrives to what it has, or replaces it.
  bool reduce = false;
  // How many ranks' chunks of one number a sender has by now and passes on: in
  // an exchange by way of others, more than its own.
  int copies = 1;
  // Whether the switch of a host carries the sends out (NVLink SHARP): each
  // chunk crosses a link once, however many sends it is part of. With `reduce`
  // the switch adds up all that is sent to one receiver, the receiver's own
  // chunk included (a send to itself), and the sum replaces what it has.
  bool in_switch = false;
  std::vector<Send> sends;
};

// What every rank holds is cut into `chunks` equal chunks. owner[c] is the rank
// to which chunk c belongs: where a reduce-scatter leaves it and an all-gather
// finds it; in an all-to-all chunk c of every rank goes there.
struct Rounds {
  int chunks = 1;
  std::vector<int> owner;
  std::vector<Round> rounds;
  // Whether chunks of one base wait for no others, so that the rounds take as
  // long as the slowest of their ways, not as the slowest send of each.
  bool apart = false;
  // Of the payload: what every rank copies from where it was to where it is
  // wanted, without sending it.
  double own_share = 0;
  // Whether a host passes on what comes from another only by whole pieces
  // (Protocol::piece), so that the first of them delays all that follow.
  bool whole_pieces = false;
};

}  // namespace tessera
