#include "tools/trainers.h"

#include <gmock/gmock.h>

#include "planner/io/importer.h"
#include "planner/ir/graph.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

class TrainersTest : public ::testing::Test {
 protected:
  // What a strategy is to a trainer.
  static Result<TrainerSettings> Of(std::string_view trainer,
                                    std::string_view strategy,
                                    std::string_view model = "llama-3-8b",
                                    const char* cluster = "dgx-h100:4") {
    ImportOptions options;
    options.global_batch = 192;
    options.seq_len = model.ends_with("-tiny") ? 64 : 1024;
    options.dtype = DType::kBFloat16;
    auto graph =
        ImportModel(ExamplePath("models/" + std::string(model)), options);
    TESSERA_CHECK(graph.has_value()) << graph.error().ToString();
    const Graph trained = *Differentiate(*std::move(graph));
    const GraphIndex index(trained);
    const Cluster on = *MakeCluster(cluster);
    TESSERA_TRY(const Strategy parsed, ParseStrategy(strategy));
    TESSERA_TRY(const Plan plan, PlanFromStrategy(index, on, parsed));
    TrainingOptions training;
    training.clip = 0.5;
    return SettingsOf(trainer, index, on, plan, training);
  }
  // The same for Megatron-LM; on one line.
  static std::string Megatron(std::string_view strategy,
                              std::string_view model = "llama-3-8b",
                              const char* cluster = "dgx-h100:4") {
    const auto settings = Of("megatron-lm", strategy, model, cluster);
    if (!settings) return settings.error().ToString();
    std::string text;
    for (const char c : settings->text) {
      if (c != '\\' && c != '\n') text += c;
    }
    return text;
  }
};

TEST_F(TrainersTest, MegatronHasDegreesBatchAndTypes) {
  EXPECT_EQ(Megatron("tp=8,mbs=2,sp=1"),
            "--tensor-model-parallel-size 8 --sequence-parallel "
            "--micro-batch-size 2 --global-batch-size 192 --seq-length 1024 "
            "--bf16 --clip-grad 0.5 --overlap-grad-reduce");
}

// 32 layers: 8 on each of four stages, 4 in each of two chunks; on three
// stages 11, 11 and, beside the head, 10.
TEST_F(TrainersTest, MegatronHasLayersOfUnevenStages) {
  EXPECT_THAT(Megatron("pp=4"),
              AllOf(HasSubstr("--pipeline-model-parallel-size 4"),
                    Not(HasSubstr("layout")), Not(HasSubstr("virtual"))));
  EXPECT_THAT(Megatron("pp=4,vp=2"),
              AllOf(HasSubstr("--num-virtual-stages-per-pipeline-rank 2"),
                    Not(HasSubstr("layout"))));
  EXPECT_THAT(Megatron("pp=3", "llama-3-8b", "dgx-h100:3"),
              HasSubstr("--pipeline-model-parallel-layout "
                        "'Et*11|t*11|t*10L'"));
}

// Sequence ranks are named by what they exchange.
TEST_F(TrainersTest, MegatronHasContext) {
  EXPECT_THAT(Megatron("cp=2"), HasSubstr("--context-parallel-size 2 "
                                          "--cp-comm-type all_gather"));
  EXPECT_THAT(Megatron("cp=2,cp-kind=ring"), HasSubstr("--cp-comm-type p2p"));
  EXPECT_THAT(Megatron("cp=2,cp-kind=ulysses"),
              HasSubstr("--cp-comm-type a2a"));
  EXPECT_THAT(Of("megatron-lm", "cp=2")->notes,
              Contains(StartsWith("cp-balance=none")));
  EXPECT_THAT(Of("megatron-lm", "cp=2,cp-balance=zigzag")->notes,
              Not(Contains(StartsWith("cp-balance"))));
}

// Of 8 replicas of experts' layers 4 share a cut: two instances, but each
// expert is there once.
TEST_F(TrainersTest, MegatronNotesInstancesThatDoNotDivideExperts) {
  EXPECT_THAT(Of("megatron-lm", "ep=8,zero=1,zero-group=4", "mixtral-8x7b",
                 "dgx-h100:1")
                  ->notes,
              Contains(StartsWith("zero-group=4")));
}

// Tensor ranks that have other experts count as expert ranks: ep 4 with tp 2
// of which none splits an expert are 8.
TEST_F(TrainersTest, MegatronCountsTensorRanksWithOtherExperts) {
  EXPECT_THAT(Megatron("ep=4,tp=2,etp=1", "mixtral-8x7b"),
              HasSubstr("--expert-model-parallel-size 8 "
                        "--expert-tensor-parallel-size 1"));
  EXPECT_THAT(Megatron("ep=4,tp=2", "mixtral-8x7b"),
              HasSubstr("--expert-model-parallel-size 4 "
                        "--expert-tensor-parallel-size 2"));
  EXPECT_THAT(Of("megatron-lm", "ep=4,tp=2", "mixtral-8x7b")->notes,
              Contains(StartsWith("sp=0")));
}

// Of 32 replicas 8 share a cut: 4 instances.
TEST_F(TrainersTest, MegatronHasZero) {
  EXPECT_THAT(
      Megatron("zero=1"),
      AllOf(HasSubstr("--use-distributed-optimizer"), Not(HasSubstr("fsdp"))));
  EXPECT_THAT(Megatron("zero=2"),
              HasSubstr("--data-parallel-sharding-strategy optim_grads "));
  EXPECT_THAT(
      Megatron("zero=3,zero-group=8"),
      AllOf(HasSubstr("--use-megatron-fsdp"),
            HasSubstr("--data-parallel-sharding-strategy optim_grads_params"),
            HasSubstr("--num-distributed-optimizer-instances 4")));
}

// 12.5 million gradients, which are added up and reduced in fp32 whatever the
// model is in. Offloaded optimizers are distributed ones.
TEST_F(TrainersTest, MegatronHasBucketsAndOffload) {
  EXPECT_THAT(Megatron("bucket=50MB"),
              HasSubstr("--overlap-grad-reduce --ddp-bucket-size 12500000"));
  EXPECT_THAT(Megatron("offload=optimizer:host"),
              AllOf(HasSubstr("--use-distributed-optimizer"),
                    HasSubstr("--optimizer-cpu-offload "
                              "--use-precision-aware-optimizer")));
  EXPECT_THAT(Of("megatron-lm", "offload=optimizer:host")->notes,
              Contains(StartsWith("zero=0")));
}

// 192 samples on 8 replicas of 8 and of 4: three microbatches and six.
TEST_F(TrainersTest, MegatronInterleavesMicrobatchesThatStagesDivide) {
  for (const char* odd : {"pp=4,vp=2,mbs=8", "pp=4,vp=2,mbs=4"}) {
    EXPECT_THAT(Of("megatron-lm", odd)->notes, Contains(StartsWith("vp=2")));
  }
  EXPECT_THAT(Of("megatron-lm", "pp=4,vp=2,mbs=2")->notes,
              Not(Contains(StartsWith("vp=2"))));
}

TEST_F(TrainersTest, MegatronHasRecomputation) {
  EXPECT_THAT(Megatron("recompute=selective"),
              HasSubstr("--recompute-granularity selective"));
  EXPECT_THAT(Megatron("recompute=full"),
              HasSubstr("full --recompute-method uniform "
                        "--recompute-num-layers 1"));
  EXPECT_THAT(Megatron("recompute=full:5"),
              HasSubstr("full --recompute-method block "
                        "--recompute-num-layers 5"));
  EXPECT_THAT(Of("megatron-lm", "pp=2,recompute=full:5")->notes,
              Contains(StartsWith("recompute=full:5")));
}

// Dimensions of one rank have no place in the order.
TEST_F(TrainersTest, MegatronHasTwoOrders) {
  EXPECT_THAT(Megatron("tp=2,pp=2,order=tp-cp-ep-pp-dp"),
              HasSubstr("--use-tp-pp-dp-mapping"));
  EXPECT_THAT(Megatron("tp=2,pp=2,order=cp-tp-ep-dp-pp"),
              Not(HasSubstr("mapping")));
  EXPECT_THAT(Of("megatron-lm", "tp=2,pp=2,order=cp-tp-ep-dp-pp")->notes,
              Not(Contains(StartsWith("order"))));
  EXPECT_THAT(Of("megatron-lm", "tp=2,pp=2,order=dp-tp-cp-ep-pp")->notes,
              Contains(StartsWith("order=dp-tp-pp")));
}

TEST_F(TrainersTest, DeepSpeedHasZeroAndOffload) {
  const auto settings = Of("deepspeed",
                           "zero=3,mbs=2,bucket=50MB,zero-group=8,"
                           "offload=optimizer:host,parameters:file");
  ASSERT_TRUE(settings.has_value()) << settings.error().ToString();
  // 192 samples on 32 ranks: three microbatches of two. bf16: 25 million.
  EXPECT_EQ(settings->settings.OneLine(),
            "{\"train_batch_size\": 192, "
            "\"train_micro_batch_size_per_gpu\": 2, "
            "\"gradient_accumulation_steps\": 3, \"gradient_clipping\": 0.5, "
            "\"bf16\": {\"enabled\": true}, \"zero_optimization\": "
            "{\"stage\": 3, \"overlap_comm\": true, "
            "\"reduce_bucket_size\": 12500000, \"mics_shard_size\": 8, "
            "\"offload_optimizer\": {\"device\": \"cpu\", \"pin_memory\": "
            "true}, \"offload_param\": {\"device\": \"nvme\", \"nvme_path\": "
            "\"/local_nvme\", \"pin_memory\": true}}}");
  EXPECT_THAT(settings->notes, Contains(HasSubstr("MiCS_Init")));
  EXPECT_THAT(settings->notes, Contains(StartsWith("nvme_path")));
}

TEST_F(TrainersTest, DeepSpeedNotesWhatDependsOnTheStage) {
  const auto notes = [](std::string_view strategy) {
    return Of("deepspeed", strategy)->notes;
  };
  EXPECT_THAT(
      Of("deepspeed", "zero=2,offload=optimizer:file")->settings.OneLine(),
      HasSubstr("\"offload_optimizer\": {\"device\": \"cpu\""));
  EXPECT_THAT(notes("zero=2,offload=optimizer:file"),
              Contains(StartsWith("offload=optimizer:file")));
  EXPECT_THAT(notes("zero=1,offload=optimizer:host,gradients:host"),
              Contains(StartsWith("offload=gradients")));
  EXPECT_THAT(notes("zero=2,offload=optimizer:host,gradients:host"), IsEmpty());
  EXPECT_THAT(notes("zero=1,offload=activations:host"),
              Contains(StartsWith("offload=activations")));
  EXPECT_THAT(notes("tp=2,order=dp-tp-cp-ep-pp"),
              Contains(StartsWith("order")));
  EXPECT_THAT(notes("tp=2"), IsEmpty());
}

TEST_F(TrainersTest, RefusesWhatAProgramHasNot) {
  EXPECT_THAT(Of("deepspeed", "tp=2,zero=3").error().ToString(),
              HasSubstr("ZeRO of stage 2 at most"));
  EXPECT_THAT(Of("deepspeed", "cp=2").error().ToString(),
              HasSubstr("the plan has cp=2"));
  EXPECT_THAT(Of("deepspeed", "tp=2,zero=1")->settings.OneLine(),
              HasSubstr("\"tensor_parallel\": {\"autotp_size\": 2}"));
  EXPECT_THAT(Of("fairscale", "").error().ToString(),
              HasSubstr("unknown trainer 'fairscale'"));
}

TEST_F(TrainersTest, MegatronTrainsDecoders) {
  for (const char* model :
       {"t5-tiny", "bert-tiny", "vit-tiny", "resnet-tiny"}) {
    const auto settings = Of("megatron-lm", "", model, "dgx-h100:1");
    ASSERT_FALSE(settings.has_value()) << model;
    EXPECT_THAT(settings.error().ToString(), HasSubstr("decoders of text"));
  }
  for (const char* model : {"gpt2-tiny", "bloom-560m", "deepseek-tiny"}) {
    EXPECT_TRUE(Of("megatron-lm", "", model, "dgx-h100:1x4")) << model;
  }
}

TEST_F(TrainersTest, NotesWhatTheyDoNotSay) {
  EXPECT_THAT(Of("megatron-lm", "dp-kind=rooted")->notes,
              Contains(StartsWith("dp-kind=rooted")));
  EXPECT_THAT(Of("megatron-lm", "pp=2,schedule=gpipe")->notes,
              Contains(StartsWith("schedule=gpipe")));
  EXPECT_THAT(Of("megatron-lm", "pp=2,zero=1")->notes, IsEmpty());
}

// A plan with a layer of its own is none of a strategy.
TEST_F(TrainersTest, RefusesPlansThatAreNotUniform) {
  ImportOptions options;
  options.global_batch = 8;
  options.seq_len = 64;
  const Graph graph =
      *Differentiate(*ImportModel(ExamplePath("models/gpt2"), options));
  const GraphIndex index(graph);
  const Cluster cluster = *MakeCluster("dgx-h100:1");
  Plan plan = *PlanFromStrategy(index, cluster, Strategy());
  for (const NodeId node : index.nodes_of_block[3]) {
    plan.ops[node.index()].recompute = CanRecompute(graph, node);
  }
  EXPECT_THAT(
      SettingsOf("megatron-lm", index, cluster, plan, {}).error().ToString(),
      HasSubstr("expected a uniform one"));
}

}  // namespace
}  // namespace tessera
