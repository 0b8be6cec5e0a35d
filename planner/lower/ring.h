#pragma once
// Ring attention (Liu, Zaharia and Abbeel 2023): an operator with a streamed
// factor (OpDef::streamed) as n steps over n ranks, each on one block of the
// streamed operands, while the next block is on its way.
//
// In step j rank i of the ring has block (i + j) mod n: operands begin at home
// and go n - 1 times to the rank before. Results without the streamed factor
// stay: a forward operator's kernel merges each step's into them, an adjoint's
// terms are added. A streamed result is a sum that follows its block: each rank
// adds its term to what arrives, and the n-th time it has come home. In memory
// are at most two travelling blocks of each operand, and of each sum what goes
// and what comes, or what has come and the term.
// Results of 16 bits are kept in fp32 until they are complete.

#include "planner/lower/lower.h"

namespace tessera {

struct RingCall {
  // What the operator would be in one task: its node, kernel and values. Values
  // with the streamed factor are sharded by `axes`.
  Task compute;
  const Node* node = nullptr;
  AxisSet axes = 0;
  int ranks = 1;                          // along them
  StreamRole stream = StreamRole::kComm;  // on which blocks travel
};

// Appends the steps to a program.
void EmitRing(const RingCall& call, BlockProgram& program);

}  // namespace tessera
