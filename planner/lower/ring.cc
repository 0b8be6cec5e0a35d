#include "planner/lower/ring.h"

#include <utility>

namespace tessera {
namespace {

class RingEmitter {
 public:
  RingEmitter(const RingCall& call, BlockProgram& program)
      : call_(call),
        program_(program),
        factor_(call.node->rule.FactorOf(call.node->op->streamed)) {}

  void Run() {
    const IndexRule& rule = call_.node->rule;
    // As the node's own results, but for those that are kept in fp32.
    const std::vector<ValueId>& results = call_.compute.writes;
    std::vector<ValueId> totals = results;
    for (ValueId& total : totals) {
      if (IsNarrow(total)) total = Like(total, 0, Wide(total));
    }
    // What the steps have made of each result so far.
    std::vector<ValueId> sums = totals;
    for (size_t k = 0; k < sums.size(); ++k) {
      if (Streams(rule.results[k])) sums[k] = Like(sums[k], 0, Wide(sums[k]));
    }
    std::vector<ValueId> blocks = call_.compute.reads;
    for (int turn = 0; turn < call_.ranks; ++turn) {
      std::vector<ValueId> next = blocks;
      if (turn + 1 < call_.ranks) Shift(rule.operands, turn + 1, next, {});
      if (turn > 0) Shift(rule.results, turn, sums, {});
      Step(turn, blocks, sums);
      blocks = std::move(next);
    }
    Shift(rule.results, call_.ranks, sums, totals);
    Round(totals, results);
  }

 private:
  const Value& value(ValueId id) const { return program_.values[id.index()]; }

  bool Streams(const Indices& indices) const { return Holds(indices, factor_); }

  bool IsNarrow(ValueId id) const { return SizeOf(value(id).dtype) == 2; }
  DType Wide(ValueId id) const {
    return IsNarrow(id) ? DType::kFloat32 : value(id).dtype;
  }

  // A value like another that is sharded as it is, but so many turns on.
  ValueId Like(ValueId of, int turn, DType dtype) {
    Value v = value(of);
    v.dtype = dtype;
    v.layout.turn = turn % call_.ranks;
    v.layout.ring = v.layout.turn == 0 ? 0 : call_.axes;
    v.category = MemoryCategory::kCommunication;
    v.alias_of = ValueId();
    program_.values.push_back(std::move(v));
    return ValueId(program_.values.size() - 1);
  }

  Task& AddTask(Task task, std::vector<ValueId> reads,
                std::vector<ValueId> writes) {
    task.reads = std::move(reads);
    task.writes = std::move(writes);
    program_.tasks.push_back(std::move(task));
    return program_.tasks.back();
  }

  // A task like the operator's, but of no node.
  Task Plain() const {
    Task task;
    task.group = call_.compute.group;
    task.pass = call_.compute.pass;
    return task;
  }

  // The streamed ones of some values go one rank on, and are as after `turn`
  // turns: in the values of `into`, or in new ones.
  void Shift(const std::vector<Indices>& indices, int turn,
             std::vector<ValueId>& values, const std::vector<ValueId>& into) {
    std::vector<ValueId> from;
    std::vector<ValueId> to;
    for (size_t k = 0; k < indices.size(); ++k) {
      if (!Streams(indices[k])) continue;
      from.push_back(values[k]);
      values[k] = into.empty() ? Like(values[k], turn, value(values[k]).dtype)
                               : into[k];
      to.push_back(values[k]);
    }
    if (from.empty()) return;
    Task task = Plain();
    task.kind = TaskKind::kComm;
    task.comm = CommKind::kShift;
    task.axes = call_.axes;
    task.stream = call_.stream;
    AddTask(std::move(task), std::move(from), std::move(to));
  }

  // The operator on one block, merged with or added to what there is.
  void Step(int turn, const std::vector<ValueId>& blocks,
            const std::vector<ValueId>& sums) {
    const bool merges = call_.node->pass == Pass::kForward;
    if (turn == 0 || merges) {
      AddTask(call_.compute, blocks, sums).accumulate = turn > 0;
      return;
    }
    std::vector<ValueId> terms;
    for (ValueId sum : sums) {
      terms.push_back(Like(sum, value(sum).layout.turn, value(sum).dtype));
    }
    AddTask(call_.compute, blocks, terms);
    for (size_t k = 0; k < sums.size(); ++k) {
      Task add = Plain();
      add.kernel = "sum";
      add.accumulate = true;
      AddTask(std::move(add), {terms[k]}, {sums[k]});
    }
  }

  void Round(const std::vector<ValueId>& totals,
             const std::vector<ValueId>& results) {
    std::vector<ValueId> from;
    std::vector<ValueId> to;
    for (size_t k = 0; k < results.size(); ++k) {
      if (totals[k] == results[k]) continue;
      from.push_back(totals[k]);
      to.push_back(results[k]);
    }
    if (from.empty()) return;
    Task task = Plain();
    task.kernel = "cast";
    AddTask(std::move(task), std::move(from), std::move(to));
  }

  const RingCall& call_;
  BlockProgram& program_;
  const int factor_;
};

}  // namespace

void EmitRing(const RingCall& call, BlockProgram& program) {
  RingEmitter(call, program).Run();
}

}  // namespace tessera
