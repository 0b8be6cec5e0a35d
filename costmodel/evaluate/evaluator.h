#pragma once
// Evaluator: the fast price of a plan, for the search.
//
// Step time, memory, violations and sources are those of lowering the plan and
// simulating it without sharing of links, to the picosecond and the byte: the
// same programs (planner/lower), the same prices (price.h), the same rule for
// when a task starts. What is saved is repetition: equal blocks are lowered and
// priced once (block_template.h), a stage's microbatch is folded into a small
// matrix once (stage.h), both remembered under exact keys. A plan that cannot
// be folded exactly is simulated instead. Time lost on shared links is left
// out; the simulator has it.
//
// Breakdown, devices and what they send are left empty: Explain fills them from
// a simulation.
//
// Thread-safe. The same plan gives the same bits, whatever came before.

#include <array>
#include <atomic>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "costmodel/evaluate/block_template.h"
#include "costmodel/evaluate/memory_check.h"
#include "costmodel/evaluate/plan_memo.h"
#include "costmodel/evaluate/stage.h"
#include "costmodel/evaluate/step.h"
#include "costmodel/memo.h"
#include "costmodel/price.h"
#include "costmodel/profile/profile_db.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"
#include "planner/plan/stages.h"
#include "planner/schedule/pipeline_schedule.h"
#include "planner/search/objective.h"

namespace tessera {

class UniformBound;
struct TaskGraph;
struct Timeline;

class Evaluator : public Objective {
 public:
  // A second or two, and a gigabyte: what a search may spend on one plan.
  static constexpr int64_t kMostInSearch = 1'000'000;
  static constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

  // `profile` may be null. `graph` is differentiated; the three outlive this,
  // unchanged. A plan of which more than `most_simulated` operators, each of
  // every microbatch, would have to be simulated is not priced, nor is one
  // whose tasks take longer, one after another, than a Duration holds: Evaluate
  // says so in its violations, and its step time is zero. `whole`, which may be
  // null and outlives this, too, is the cluster before parts failed
  // (costmodel/exchange_price.h).
  Evaluator(const Graph& graph, const Cluster& cluster,
            const ProfileDb* profile, const TrainingOptions& options,
            int64_t most_simulated = kUnlimited,
            const Cluster* whole = nullptr);
  ~Evaluator() override;

  const Cluster* whole() const { return whole_; }

  // REQUIRES (both): Validate(graph, cluster, plan) is empty.
  Evaluation Evaluate(const Plan& plan) const override;
  // The same bits, found from the blocks of the plan before.
  Evaluation EvaluateChange(
      const Plan& plan, const PlanChange& change,
      std::shared_ptr<const PlanBasis>& basis) const override;

  // Less than 1 of plans with groups side by side: these are simulated, which
  // takes as many times as long as there are microbatches.
  double PricedShare(const Plan& plan) const override;

  // Strategies without a table of actions are remembered, up to a million:
  // asked for again, one takes well below a microsecond.
  // REQUIRES: `index` is of the graph, and `cluster` the constructor's.
  std::optional<Score> EvaluateUniform(const GraphIndex& index,
                                       const Cluster& cluster,
                                       const Strategy& strategy) const override;

  // See uniform_bound.h.
  Score BoundUniform(const GraphIndex& index, const Strategy& strategy,
                     Bound bound) const override;
  // Of graphs with so many unlike blocks that bounds take as long as prices.
  bool EstimatesUniform() const override { return Estimates() != nullptr; }
  std::optional<Score> EstimateUniform(const GraphIndex& index,
                                       const Strategy& strategy,
                                       Bound bound) const override;
  std::vector<LayerCost> LayerCosts(const Strategy& strategy,
                                    DeviceId first) const override;

  // As Evaluate, with the breakdown of the bottleneck group and the memory of
  // every device. Lowers and simulates the whole step. With `share_links` step
  // time and breakdown are those of the simulation with shared links. Of a plan
  // that is too large for that it is what Evaluate says: no breakdown.
  Evaluation Explain(const Plan& plan, bool share_links = true) const;
  // The same of a simulation that is there already: of the plan's tasks, as
  // Lower makes them.
  Evaluation Explain(const Plan& plan, const TaskGraph& tasks,
                     const Timeline& timeline) const;
  // What Explain says of a plan that is too large: nothing is simulated.
  Evaluation ExplainUnsimulated(const Plan& plan) const;

  // What the time of a simulation goes by: operators, each of every microbatch.
  int64_t OperatorsOf(const Plan& plan) const;
  // Of more of them than twice `most_simulated`.
  bool IsTooLargeToExplain(const Plan& plan) const;
  // Of a twentieth of `most_simulated` at most.
  bool IsQuickToExplain(const Plan& plan) const;

  // The step time of the simulation with shared links, where that is quick.
  std::optional<Duration> QuickSharedStepTime(const Plan& plan) const override;

  // For a simulator that gives the same prices.
  const Pricer& pricer() const { return pricer_; }

  // How many plans could not be folded and were simulated.
  int64_t simulated() const { return simulated_; }
  // How many blocks were lowered for the others, in some of their programs.
  int64_t blocks_lowered() const { return blocks_lowered_; }

 private:
  struct Program {
    int number = -1;  // names it in the keys of blocks
    TemplateProgram priced;
  };
  using ProgramPtr = std::shared_ptr<const Program>;
  struct Block {
    int number = -1;           // names its programs in the keys of stages
    int sums = -1;             // names the layouts in the keys of other blocks
    std::vector<Layout> laid;  // of BlockShape::sums
    BlockTemplate priced;
  };
  struct Order {
    int number = -1;  // names it; -1 for a plan's own table
    std::vector<StageAction> actions;
    SteadyPhase steady;
    StageOrders stages;
    std::vector<SteadyPhase> stage_steady;  // by stage, of its actions
    std::vector<bool> splits;               // by stage: its backwards are split
    bool folds = true;                      // each stage splits all or none
  };
  using BlockPtr = std::shared_ptr<const Block>;
  struct NumberedStage {
    int number = -1;  // names it
    std::shared_ptr<const Stage> stage;
  };

  // The blocks of the graph, and who is around whom.
  struct Neighbours {
    std::vector<BlockShape> shapes;
    std::vector<std::vector<int>> dependents;  // by block: whose programs
                                               // depend on it
    std::vector<std::vector<int>> readers;     // by weight: blocks
  };
  // A plan, block by block.
  struct Blocks : PlanBasis {
    int prefetch = 0;
    std::shared_ptr<const Order> order;
    std::vector<GroupId> groups;
    std::vector<int> chunks;
    std::vector<int> decisions;  // numbers of what is decided in each
    std::vector<bool> begins;    // its group
    std::vector<BlockPtr> blocks;
    // ClassOf pairs of groups, -1 where it was not asked for.
    std::vector<int> classes;
    // Of the sum of squares, if it is reduced; negative otherwise.
    TaskCost world{{-1}, CostSource::kMeasured};
    // In its group, of the rank whose bytes count; of the largest shards where
    // there is none.
    std::optional<int> position;
  };

  const Neighbours& NeighboursFor(int prefetch) const;
  std::shared_ptr<const Blocks> BlocksOf(const Plan& plan, int prefetch,
                                         std::shared_ptr<const Order> order,
                                         const PlanChange& change,
                                         const Blocks* before) const;
  void FindBlocks(const Plan& plan, const Neighbours& around,
                  std::vector<bool>& stale, Blocks& now) const;
  int DecisionsOf(const Plan& plan, const BlockShape& shape) const;
  // A number for a key.
  int NumberOf(const IntKey& key) const;
  // A block with what tells it from others.
  struct BlockSetting {
    int block = -1;
    const BlockShape* shape = nullptr;
    bool begins = false;  // its group
    bool splits = false;  // its backwards are split
    int prefetch = 0;
    int64_t streams = 0;          // StreamsOf
    std::optional<int> position;  // Blocks::position
    // Of the groups around it.
    std::function<int64_t(GroupId)> number_of;
    std::function<int64_t(GroupId)> class_of;  // with its own
  };
  // Numbers, by ProgramKind, of what the block's programs see of the plan.
  std::array<int, kProgramKinds> SeenBy(const BlockSetting& setting,
                                        const LoweringContext& context) const;
  BlockPtr FindPrograms(const BlockSetting& setting, Programs& programs) const;
  ProgramPtr FindProgram(int seen, ProgramKind kind,
                         const BlockSetting& setting, Programs& programs,
                         bool& lowered) const;
  // Whose blocks' shapes are those for `prefetch`.
  NumberedStage StageOf(const std::vector<BlockPtr>& blocks,
                        const std::vector<BlockShape>& shapes, int prefetch,
                        const StepStage& stage, bool splits,
                        int microbatches) const;
  // What decides on the streams of the whole plan.
  int64_t StreamsOf(const Plan& plan, int stages) const;
  MemoryUse PeakOf(const NumberedStage& stage, const Order& order,
                   size_t number, int microbatches) const;
  // Of the devices of stage `s` of a folded plan, which are `set`.
  std::vector<KindMemory> MemoryByKindOf(const Plan& plan, const Blocks& blocks,
                                         const StepStage& stage, size_t s,
                                         const DeviceSet& set) const;
  std::shared_ptr<const Order> OrderOf(const Plan& plan) const;
  TaskCost WorldReduce(const Plan& plan) const;
  Evaluation EvaluateBySimulation(const Plan& plan) const;
  Evaluation SimulateAnew(const Plan& plan) const;
  // What Explain says of a step that was simulated.
  void AddStep(const Plan& plan, const TaskGraph& tasks,
               const Timeline& timeline, Evaluation& result) const;

  const Graph& graph_;
  const Cluster& cluster_;
  const ProfileDb* const profile_;
  const TrainingOptions options_;
  const int64_t most_simulated_;
  const Cluster* const whole_;
  const LoweringFacts facts_;
  const std::unique_ptr<const GraphIndex> index_;  // where AddOverheads asks it
  const Pricer pricer_;
  const std::vector<int> forms_;  // FormsOf

  mutable std::mutex shapes_mutex_;
  mutable std::map<int, Neighbours> shapes_;  // by prefetch
  mutable std::atomic<int> numbers_ = 0;
  mutable std::atomic<int64_t> simulated_ = 0;
  mutable std::atomic<int64_t> blocks_lowered_ = 0;
  // What is remembered, from a plan's parts to whole stages. Keys hold the
  // numbers of what they are made of:
  //
  //   memo        of               by
  //   decisions_  a number         splits, recomputation, tiles and ZeRO's cuts
  //                                of a block
  //   blocks_     a block          decisions in it and around, sums around,
  //                                classes of groups, what else the plan says
  //   seen_       a number         what of these its programs see
  //                                (surroundings.h), and whose bytes count
  //   programs_   programs         what is seen, and their kind; they differ in
  //                                the sizes of buckets that they are of
  //   sums_       a number         the layouts of a block's gradient sums
  //   templates_  a block          programs and sums: two blocks of blocks_ may
  //                                be one here
  //   stages_     a folded stage   templates and their wiring
  //   peaks_      memory           a stage and the schedule's order
  //   uniform_    a score          a strategy
  //   plans_      an evaluation    a plan that does not fold
  //
  // At most so many entries each: a program takes 3 kB, a stage of a dozen
  // blocks 100 kB, the key of a decision 1 kB, of what programs see 3 kB, a
  // score 200 bytes.
  mutable Memo<int> decisions_{100'000};
  mutable Memo<BlockPtr> blocks_{10'000};
  mutable Memo<int> seen_{20'000};
  static constexpr size_t kMaxPrograms = 20'000;
  mutable std::shared_mutex programs_mutex_;
  mutable std::unordered_map<IntKey, std::vector<ProgramPtr>, IntKeyHash>
      programs_;
  mutable Memo<BlockPtr> templates_{10'000};
  mutable Memo<int> sums_{100'000};
  mutable Memo<NumberedStage> stages_{40'000};  // weighed by their blocks
  mutable Memo<MemoryUse> peaks_{100'000};
  mutable Memo<std::optional<Score>> uniform_{1'000'000};
  mutable PlanMemo plans_{1'000'000};
  const UniformBound& Bounds() const;
  // Null where bounds do.
  const UniformBound* Estimates() const;
  mutable std::once_flag bound_made_;
  mutable std::unique_ptr<const UniformBound> bound_;
  mutable std::unique_ptr<const UniformBound> estimate_;
  mutable std::mutex orders_mutex_;
  mutable std::map<std::pair<std::string, PipelineShape>,
                   std::shared_ptr<const Order>>
      orders_;
};

}  // namespace tessera
