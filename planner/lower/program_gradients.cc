// Gradients: buckets, reductions, shards, terms of tied weights.

#include <algorithm>

#include "planner/lower/program_builder.h"

namespace tessera {

std::vector<ReshardStep> ProgramBuilder::GradientSteps(const Layout& from,
                                                       const Layout& to) const {
  std::vector<ReshardStep> steps = PlanReshard(from, to, group());
  const auto sum =
      std::ranges::find(steps, ReshardKind::kAllReduce, &ReshardStep::kind);
  if (sum == steps.begin() || sum == steps.end()) return steps;
  AxisSet activations = 0;
  for (TensorId weight : context_.home_weights(block_)) {
    for (AxisSet axes : context_.replicas(weight)[0].layout.dims) {
      activations |= axes;
    }
  }
  if ((sum->axes & ~activations) != 0) return steps;
  Layout summed = from;
  summed.partial &= ~sum->axes;
  std::vector<ReshardStep> sum_first = {
      {ReshardKind::kAllReduce, sum->axes, summed}};
  for (ReshardStep& step : PlanReshard(summed, to, group())) {
    sum_first.push_back(std::move(step));
  }
  return sum_first;
}

std::vector<ValueId> ProgramBuilder::Reduce(
    const std::vector<WeightPiece>& weights,
    const std::vector<std::vector<ValueId>>& terms_of) {
  struct Term {
    size_t weight;  // index into `weights`
    ValueId id;
    std::vector<ReshardStep> steps;
    size_t next = 0;  // of the steps
  };
  std::vector<Term> terms;
  for (size_t w = 0; w < weights.size(); ++w) {
    const Layout target = context_.StateLayout(weights[w]);
    for (ValueId id : terms_of[w]) {
      terms.push_back({w, id, GradientSteps(value(id).layout, target)});
    }
  }
  const auto same = [](const ReshardStep& a, const ReshardStep& b) {
    return a.kind == b.kind && a.axes == b.axes;
  };
  const auto waits = [](const Term& term) {
    return term.next < term.steps.size();
  };
  // A step that a term comes to only later waits for it, so that both are one.
  const auto comes_later = [&](const ReshardStep& step) {
    return std::ranges::any_of(terms, [&](const Term& term) {
      return std::any_of(
          term.steps.begin() + static_cast<std::ptrdiff_t>(
                                   std::min(term.next + 1, term.steps.size())),
          term.steps.end(),
          [&](const ReshardStep& later) { return same(step, later); });
    });
  };
  for (;;) {
    // In order of first appearance, so that all ranks agree.
    const Term* first = nullptr;
    for (const Term& term : terms) {
      if (!waits(term)) continue;
      if (first == nullptr) first = &term;
      if (comes_later(term.steps[term.next])) continue;
      first = &term;
      break;
    }
    if (first == nullptr) break;
    const ReshardStep step = first->steps[first->next];
    std::vector<ValueId> from;
    std::vector<Layout> to;
    std::vector<Term*> members;
    for (Term& term : terms) {
      if (!waits(term) || !same(term.steps[term.next], step)) continue;
      from.push_back(term.id);
      to.push_back(term.steps[term.next++].to);
      members.push_back(&term);
    }
    const auto results = EmitStep(step.kind, step.axes, from, to, true,
                                  MemoryCategory::kGradient);
    for (size_t i = 0; i < members.size(); ++i) members[i]->id = results[i];
  }
  std::vector<ValueId> reduced;
  for (size_t w = 0; w < weights.size(); ++w) {
    std::vector<ValueId> ready;
    for (const Term& term : terms) {
      if (term.weight == w) ready.push_back(term.id);
    }
    if (ready.size() > 1) {
      const ValueId sum =
          Relaid(ready[0], value(ready[0]).layout, MemoryCategory::kGradient);
      AddTask(TaskKind::kCompute, ready, {sum}).kernel = "sum";
      ready[0] = sum;
    }
    reduced.push_back(ready[0]);
  }
  return reduced;
}

void ProgramBuilder::Complete(TensorId weight) {
  if (ReducesEach(weight)) {
    // Tiles are reduced one by one as they are made.
    if (context_.tiles(weight) > 1) return;
  } else {
    const auto& home = context_.home_weights(block_);
    const bool last = kind_ == ProgramKind::kBackwardReduce ||
                      kind_ == ProgramKind::kBackwardWeightReduce;
    if (!last || !context_.CompleteWithBackward(weight) ||
        std::find(home.begin(), home.end(), weight) == home.end()) {
      return;
    }
  }
  for (const WeightPiece& piece : PiecesOf({weight})) AddToBucket(piece);
}

void ProgramBuilder::AddToBucket(const WeightPiece& piece) {
  const int64_t limit = context_.plan().bucket_bytes.value;
  if (limit == 0) {
    auto all = std::ranges::find(buckets_, here_, &Bucket::group);
    if (all == buckets_.end()) {
      all = buckets_.insert(buckets_.end(), {here_, {}, {}, 0});
    }
    all->weights.push_back(piece);
    NoteBucket(0);
    return;
  }
  Bucket wanted;
  wanted.group = here_;
  for (ValueId term : CompleteTerms(piece)) {
    const Value& v = value(term);
    for (const ReshardStep& step :
         GradientSteps(v.layout, context_.StateLayout(piece))) {
      wanted.steps.emplace_back(step.kind, step.axes);
    }
    wanted.bytes +=
        LargestElements(v.layout, group(), v.shape) * SizeOf(v.dtype);
  }
  auto bucket =
      std::find_if(buckets_.begin(), buckets_.end(), [&](const Bucket& b) {
        return b.group == wanted.group && b.steps == wanted.steps;
      });
  if (bucket == buckets_.end()) {
    bucket = buckets_.insert(buckets_.end(), {here_, wanted.steps, {}, 0});
  }
  bucket->weights.push_back(piece);
  bucket->bytes += wanted.bytes;
  NoteBucket(bucket->bytes);
  if (bucket->bytes < limit) return;
  ReduceBucket(*bucket);
  buckets_.erase(bucket);
}

// That a bucket of so many bytes is compared with the limit.
void ProgramBuilder::NoteBucket(int64_t bytes) {
  const int64_t limit = context_.plan().bucket_bytes.value;
  int64_t& least = program_.least_bucket.value;
  int64_t& most = program_.most_bucket.value;
  least = std::max<int64_t>(least, 1);
  if (limit == 0) {
    least = most = 0;
  } else if (bytes < limit) {
    least = std::max(least, bytes + 1);
  } else {
    most = std::min(most, bytes);
  }
}

std::vector<ValueId> ProgramBuilder::CompleteTerms(const WeightPiece& piece) {
  return ReducesEach(piece.weight) ? new_gradients_.at(piece)
                                   : GradientTerms(piece);
}

void ProgramBuilder::ReduceBucket(const Bucket& bucket) {
  here_ = bucket.group;
  std::vector<std::vector<ValueId>> terms;
  for (const WeightPiece& piece : bucket.weights) {
    terms.push_back(CompleteTerms(piece));
  }
  const std::vector<ValueId> reduced = Reduce(bucket.weights, terms);
  std::vector<std::pair<WeightPiece, ValueId>> complete;
  std::vector<std::pair<WeightPiece, ValueId>> leaving;
  for (size_t w = 0; w < reduced.size(); ++w) {
    const WeightPiece& piece = bucket.weights[w];
    if (context_.HasHostGradient(piece.weight)) {
      leaving.emplace_back(piece, reduced[w]);
    } else if (ReducesEach(piece.weight)) {
      AddShard(piece, reduced[w]);
    } else {
      program_.exports.push_back({PortOf(Port::kReduced, piece), reduced[w]});
      complete.emplace_back(piece, reduced[w]);
    }
  }
  CopyOutGradients(complete);
  AddOnHost(leaving);
}

bool ProgramBuilder::ReducesEach(TensorId weight) const {
  return context_.ZeroStage(weight) >= 2 || context_.HasHostGradient(weight);
}

void ProgramBuilder::AddShard(const WeightPiece& piece, ValueId shard) {
  const auto made = std::find_if(
      program_.tasks.rbegin(), program_.tasks.rend(), [&](const Task& task) {
        return std::find(task.writes.begin(), task.writes.end(), shard) !=
               task.writes.end();
      });
  TESSERA_CHECK(made != program_.tasks.rend())
      << graph_.tensor(piece.weight).name;
  const StreamRole stream = made->stream;
  const AxisSet axes = made->axes;
  const ValueId sum = Reduced(piece);
  Task& task = AddTask(TaskKind::kCompute, {shard}, {sum});
  task.kernel = "sum";
  task.accumulate = true;
  task.stream = stream;
  task.axes = axes;
}

std::vector<ValueId> ProgramBuilder::GradientTerms(const WeightPiece& piece) {
  std::vector<ValueId> terms;
  const auto& gradients = ReplicaHere(piece.weight).gradients;
  for (size_t i = 0; i < gradients.size(); ++i) {
    terms.push_back(Accumulator(piece, static_cast<int>(i)));
  }
  const auto received = received_.find(piece.weight);
  if (received == received_.end()) return terms;
  for (ValueId id : received->second) {
    const auto same = std::find_if(
        terms.begin(), terms.end(),
        [&](ValueId other) { return value(other).layout == value(id).layout; });
    if (same == terms.end()) {
      terms.push_back(id);
      continue;
    }
    const ValueId sum =
        Relaid(*same, value(id).layout, MemoryCategory::kGradient);
    AddTask(TaskKind::kCompute, {*same, id}, {sum}).kernel = "sum";
    *same = sum;
  }
  return terms;
}

Layout ProgramBuilder::TravelLayout(TensorId weight,
                                    const LoweringContext::Replica& replica,
                                    size_t index) const {
  const auto& home = context_.replicas(weight)[0];
  const auto& groups = context_.plan().groups;
  Layout layout = replica.gradients[index];
  if (SameMesh(groups[replica.group.index()], groups[home.group.index()])) {
    return layout;
  }
  return home.layout;
}

void ProgramBuilder::EmitTie() {
  // Replicas that live in this block send their terms home.
  for (TensorId weight : context_.tied_weights()) {
    const auto& replicas = context_.replicas(weight);
    for (size_t r = 1; r < replicas.size(); ++r) {
      if (replicas[r].block != block_) continue;
      here_ = replicas[r].group;
      for (size_t i = 0; i < replicas[r].gradients.size(); ++i) {
        ValueId id = Accumulator({weight}, static_cast<int>(i));
        const auto& home = context_.plan().groups[replicas[0].group.index()];
        if (!SameMesh(group(), home)) {
          Layout whole = value(id).layout;
          whole.partial = 0;
          id = Reshard(id, whole, true, MemoryCategory::kGradient);
        }
        EmitSend({Port::kAccumulator, weight, static_cast<int>(i)},
                 replicas[0].group, id, StreamRole::kSendBackward);
      }
    }
  }
  std::vector<TensorId> tied;
  for (TensorId weight : context_.home_weights(block_)) {
    if (context_.CompleteWithBackward(weight) || ReducesEach(weight)) {
      continue;
    }
    const auto& replicas = context_.replicas(weight);
    tied.push_back(weight);
    here_ = replicas[0].group;
    for (size_t r = 1; r < replicas.size(); ++r) {
      for (size_t i = 0; i < replicas[r].gradients.size(); ++i) {
        Value v = TensorValue(weight, "tied gradient",
                              TravelLayout(weight, replicas[r], i),
                              MemoryCategory::kGradient);
        v.dtype = GradientDType(weight);
        const ValueId id = AddValue(std::move(v));
        EmitReceive({Port::kAccumulator, weight, static_cast<int>(i)},
                    replicas[r].group, id, StreamRole::kRecvBackward);
        received_[weight].push_back(id);
      }
    }
  }
  AtHome(PiecesOf(tied), [&](const std::vector<WeightPiece>& pieces) {
    ReduceBucket({here_, {}, pieces, 0});
  });
  CopyOutShards(false);
}

}  // namespace tessera
