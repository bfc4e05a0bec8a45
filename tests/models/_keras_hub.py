"""All backbones of keras-hub, in small sizes, and some of its tasks."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from _case import Case
from keras_hub import models
from keras_hub.src.models.blip2.blip2_custom_opt import BLIP2CustomOPT
from keras_hub.src.models.blip2.blip2_qformer import BLIP2QFormer
from keras_hub.src.models.blip2.blip2_vision_encoder import BLIP2VisionEncoder
from keras_hub.src.models.gemma3.gemma3_vision_encoder import Gemma3VisionEncoder
from keras_hub.src.models.rqvae.rqvae_backbone import RQVAEBackbone
from keras_hub.src.models.sam.sam_mask_decoder import SAMMaskDecoder
from keras_hub.src.models.sam.sam_prompt_encoder import SAMPromptEncoder
from keras_hub.src.models.sam3 import sam3_detr_decoder, sam3_detr_encoder
from keras_hub.src.models.sam3.sam3_geometry_encoder import SAM3GeometryEncoder
from keras_hub.src.models.sam3.sam3_mask_decoder import SAM3MaskDecoder
from keras_hub.src.models.sam3.sam3_text_encoder import SAM3TextEncoder
from keras_hub.src.models.sam3.sam3_vision_encoder import SAM3VisionEncoder
from keras_hub.src.models.vae.vae_backbone import VAEBackbone

_PACKAGE = "keras-hub"
_IMAGE = (32, 32, 3)
_TEXT = {"vocabulary_size": 16, "num_layers": 1, "hidden_dim": 16, "intermediate_dim": 32}
_HEADS = {**_TEXT, "num_heads": 2}
_SHORT = {**_HEADS, "max_sequence_length": 8}
_GROUPED = {**_TEXT, "num_query_heads": 4, "num_key_value_heads": 2}
_GEMMA = {**_GROUPED, "head_dim": 8}
_VISION = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16}
_PATCHES = {**_VISION, "image_shape": _IMAGE, "patch_size": 8}
_TOWER = {"patch_size": 8, **_VISION, "intermediate_dim": 32, "image_shape": _IMAGE}
_WORDS = {**_HEADS, "embedding_dim": 16, "max_sequence_length": 8}
_TEXT_TOWER = {**_WORDS, "name": "text_encoder"}
_VISION_TOWER = {**_TOWER, "name": "vision_encoder"}
_EXPERTS = {"moe_intermediate_dim": 8, "num_experts": 4, "top_k": 2}
_LINEAR_ATTENTION = {
    **{key: _GEMMA[key] for key in _GEMMA if key != "intermediate_dim"},
    "num_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}
_T5_GEMMA = {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in {
        "hidden_dim": 16,
        "intermediate_dim": 32,
        "num_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "layer_types": ["full_attention"],
    }.items()
} | {"vocabulary_size": 16, "cross_attention_hidden_size": 16}
_RESNET = {
    "input_conv_filters": [64],
    "input_conv_kernel_sizes": [3],
    "stackwise_num_filters": [64, 64, 64],
    "stackwise_num_blocks": [1, 1, 1],
    "stackwise_num_strides": [1, 2, 2],
    "block_type": "basic_block",
}
_DEEP = {**_RESNET, "stackwise_num_blocks": [1] * 4, "stackwise_num_strides": [1, 2, 2, 2]}
_VIT_DET = {
    "hidden_size": 16,
    "num_layers": 1,
    "intermediate_dim": 32,
    "num_heads": 2,
    "global_attention_layer_indices": [0],
    "num_output_channels": 8,
    "window_size": 2,
}
_MIT = {
    "layerwise_depths": [1, 1],
    "num_layers": 2,
    "layerwise_num_heads": [1, 2],
    "layerwise_sr_ratios": [4, 2],
    "max_drop_path_rate": 0.0,
    "layerwise_patch_sizes": [7, 3],
    "layerwise_strides": [4, 2],
    "hidden_dims": [8, 16],
    "image_shape": _IMAGE,
}
_DINO = {**_TOWER, "drop_path_rate": 0.0}


def _hgnet(**options: Any) -> Any:
    return models.HGNetV2Backbone(
        depths=[1, 1],
        embedding_size=8,
        hidden_sizes=[16, 32],
        stem_channels=[3, 8, 8],
        hidden_act="relu",
        use_learnable_affine_block=True,
        stackwise_stage_filters=[[8, 8, 16, 1, 1, 3], [16, 8, 32, 1, 1, 3]],
        apply_downsample=[False, True],
        use_lightweight_conv_block=[False, False],
        image_shape=_IMAGE,
        out_features=["stage1", "stage2"],
    )


def _d_fine() -> Any:
    return models.DFineBackbone(
        backbone=_hgnet(),
        decoder_in_channels=[16, 16],
        encoder_hidden_dim=16,
        num_labels=4,
        num_denoising=0,
        learn_initial_query=False,
        num_queries=10,
        anchor_image_size=(32, 32),
        feat_strides=[4, 8],
        num_feature_levels=2,
        hidden_dim=16,
        encoder_in_channels=[16, 32],
        encode_proj_layers=[1],
        num_attention_heads=2,
        encoder_ffn_dim=32,
        num_encoder_layers=1,
        hidden_expansion=0.5,
        depth_multiplier=0.5,
        eval_idx=-1,
        num_decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=32,
        decoder_n_points=[2, 2],
        lqe_hidden_dim=16,
        num_lqe_layers=2,
        out_features=["stage1", "stage2"],
        image_shape=_IMAGE,
        seed=0,
    )


def _blip2() -> Any:
    return models.BLIP2Backbone(
        vision_encoder=BLIP2VisionEncoder(
            image_size=32,
            patch_size=8,
            **_VISION,
            intermediate_dim=32,
            use_patch_bias=True,
            use_class_token=True,
            use_mha_bias=True,
            use_mlp_bias=True,
            dropout_rate=0.0,
            layer_norm_epsilon=1e-6,
            initializer_range=0.02,
        ),
        qformer=BLIP2QFormer(
            num_query_tokens=2,
            **_VISION,
            intermediate_dim=32,
            vision_dim=16,
            cross_attention_frequency=1,
            dropout=0.0,
            layer_norm_epsilon=1e-6,
        ),
        language_model=BLIP2CustomOPT(
            **_HEADS,
            num_query_tokens=2,
            qformer_hidden_dim=16,
            max_sequence_length=16,
            dropout=0.0,
            language_projection=None,
        ),
    )


def _two_towers(name: str, **options: Any) -> Callable[[], Any]:
    backbone, vision, text = (
        getattr(models, name + part) for part in ("Backbone", "VisionEncoder", "TextEncoder")
    )
    return lambda: backbone(
        vision_encoder=vision(**_VISION_TOWER), text_encoder=text(**_TEXT_TOWER), **options
    )


def _resnet() -> Any:
    return models.ResNetBackbone(**_RESNET, image_shape=_IMAGE)


def _vae() -> Any:
    return VAEBackbone([32, 32], [1, 1], [32, 32], [1, 1], sampler_method="mode", name="vae")


def _clip_text(name: str) -> Any:
    sizes = {**_WORDS, "num_layers": 2}
    return models.CLIPTextEncoder(**sizes, intermediate_output_index=-2, name=name)


def _stable_diffusion_3() -> Any:
    return models.StableDiffusion3Backbone(
        mmdit_patch_size=2,
        mmdit_hidden_dim=32,
        mmdit_num_layers=1,
        mmdit_num_heads=2,
        mmdit_position_size=16,
        mmdit_qk_norm=None,
        mmdit_dual_attention_indices=None,
        vae=VAEBackbone([32] * 4, [1] * 4, [32] * 4, [1] * 4, sampler_method="mode", name="vae"),
        clip_l=_clip_text("clip_l"),
        clip_g=_clip_text("clip_g"),
        image_shape=_IMAGE,
    )


def _sam() -> Any:
    return models.SAMBackbone(
        image_encoder=models.ViTDetBackbone(**_VIT_DET, patch_size=8, image_shape=_IMAGE),
        prompt_encoder=SAMPromptEncoder(
            hidden_size=8,
            image_embedding_size=(4, 4),
            input_image_size=(32, 32),
            mask_in_channels=16,
        ),
        mask_decoder=SAMMaskDecoder(
            num_layers=1,
            hidden_size=8,
            intermediate_dim=32,
            num_heads=2,
            embedding_dim=8,
            num_multimask_outputs=3,
            iou_head_depth=2,
            iou_head_hidden_dim=8,
        ),
    )


def _sam3() -> Any:
    image = (28, 28, 3)
    sizes = {**_VISION, "intermediate_dim": 32}
    return models.SAM3PromptableConceptBackbone(
        vision_encoder=SAM3VisionEncoder(
            image_shape=image,
            patch_size=14,
            **sizes,
            fpn_hidden_dim=16,
            fpn_scale_factors=[4.0, 2.0, 1.0, 0.5],
            pretrain_image_shape=(42, 42, 3),
            window_size=2,
            global_attn_indexes=[0],
        ),
        text_encoder=SAM3TextEncoder(vocabulary_size=32, embedding_dim=16, **sizes),
        geometry_encoder=SAM3GeometryEncoder(**sizes, roi_size=7, dropout_rate=0.0),
        detr_encoder=sam3_detr_encoder.SAM3DetrEncoder(**sizes, dropout_rate=0.0),
        detr_decoder=sam3_detr_decoder.SAM3DetrDecoder(
            image_shape=image, patch_size=14, **sizes, num_queries=4, dropout_rate=0.0
        ),
        mask_decoder=SAM3MaskDecoder(
            num_upsampling_stages=3, hidden_dim=16, num_heads=2, dropout_rate=0.0
        ),
    )


def _mobile_net_v5() -> Any:
    absent = [f"{of}kernel_sizes" for of in ("dw_", "dw_start_", "dw_end_", "exp_", "pw_")]
    absent += ["num_heads", "key_dims", "value_dims", "kv_strides"]
    both = {"num_blocks": 1, "num_filters": 8, "strides": 2, "act_layers": "relu"}
    both |= {"exp_ratios": 2.0, "se_ratios": 0.0, "use_cpe": False, **dict.fromkeys(absent, 0)}
    one = {**both, "block_types": "er", "exp_kernel_sizes": 3, "pw_kernel_sizes": 1}
    other = {**both, "block_types": "uir", "dw_kernel_sizes": 5}
    stacks: dict[str, Any] = {f"stackwise_{key}": [[one[key]], [other[key]]] for key in one}
    stacks["stackwise_num_blocks"] = [1, 1]
    return models.MobileNetV5Backbone(**stacks, stem_size=8, use_msfa=False, image_shape=_IMAGE)


def _mobile_net() -> Any:
    return models.MobileNetBackbone(
        stackwise_expansion=[[16], [24]],
        stackwise_num_blocks=[1, 1],
        stackwise_num_filters=[[8], [16]],
        stackwise_kernel_size=[[3], [5]],
        stackwise_num_strides=[[2], [2]],
        stackwise_se_ratio=[[None], [0.25]],
        stackwise_activation=[["relu"], ["hard_swish"]],
        stackwise_padding=[[1], [2]],
        output_num_filters=32,
        depthwise_filters=8,
        depthwise_stride=2,
        depthwise_residual=False,
        last_layer_filter=32,
        squeeze_and_excite=0.5,
        input_num_filters=8,
        image_shape=_IMAGE,
    )


def _efficient_net() -> Any:
    return models.EfficientNetBackbone(
        stackwise_width_coefficients=[1.0, 1.0],
        stackwise_depth_coefficients=[1.0, 1.0],
        stackwise_kernel_sizes=[3, 3],
        stackwise_num_repeats=[1, 1],
        stackwise_input_filters=[8, 8],
        stackwise_output_filters=[8, 16],
        stackwise_expansion_ratios=[1, 2],
        stackwise_squeeze_and_excite_ratios=[0.0, 0.25],
        stackwise_strides=[1, 2],
        stackwise_block_types=["fused", "unfused"],
        stackwise_force_input_filters=[0, 0],
        stackwise_nores_option=[False, False],
        dropout=0.0,
        input_shape=_IMAGE,
    )


def _gemma3(**options: Any) -> Any:
    return models.Gemma3Backbone(**_GEMMA, image_size=16, dropout=0.0, **options)


def _gemma3_with_images() -> Any:
    return _gemma3(
        vision_encoder=Gemma3VisionEncoder(
            image_size=16, patch_size=4, pool_size=2, **_VISION, intermediate_dim=32, output_dim=16
        )
    )


def _par_seq() -> Any:
    return models.PARSeqBackbone(
        image_encoder=models.ViTBackbone(
            image_shape=(16, 32, 3),
            patch_size=(8, 8),
            **_VISION,
            mlp_dim=32,
            use_class_token=False,
            name="image_encoder",
        ),
        vocabulary_size=16,
        max_label_length=8,
        decoder_hidden_dim=16,
        num_decoder_layers=1,
        num_decoder_heads=2,
        decoder_mlp_dim=32,
        dropout_rate=0.0,
        attention_dropout=0.0,
    )


def _csp_net() -> Any:
    return models.CSPNetBackbone(
        stem_filters=8,
        stem_kernel_size=3,
        stem_strides=1,
        stackwise_depth=[1, 1],
        stackwise_strides=2,
        stackwise_num_filters=[8, 16],
        block_type="dark_block",
        bottle_ratio=1.0,
        block_ratio=0.5,
        expand_ratio=1.0,
        stage_type="csp",
        stem_padding="same",
        down_growth=True,
        image_shape=_IMAGE,
    )


def _places_of_images(_: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.arange(shape[1]), shape)


def _of_vision(_: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.arange(shape[1]) < 4, shape)


_BACKBONES: dict[str, dict[str, Any] | Callable[[], Any]] = {
    "AlbertBackbone": {**_SHORT, "embedding_dim": 16},
    "BASNetBackbone": lambda: models.BASNetBackbone(
        image_encoder=models.ResNetBackbone(
            **{**_DEEP, "stackwise_num_filters": [64, 128, 256, 512]}
        ),
        num_classes=1,
        image_shape=_IMAGE,
        projection_filters=64,
    ),
    "BLIP2Backbone": _blip2,
    "BartBackbone": _SHORT,
    "BertBackbone": _SHORT,
    "BloomBackbone": _HEADS,
    "CLIPBackbone": _two_towers("CLIP", projection_dim=16),
    "CLIPTextEncoder": _TEXT_TOWER,
    "CLIPVisionEncoder": _VISION_TOWER,
    "CSPNetBackbone": _csp_net,
    "DFineBackbone": _d_fine,
    "DINOV2Backbone": {**_DINO, "position_embedding_shape": _IMAGE},
    "DINOV3Backbone": _DINO,
    "DebertaV3Backbone": {**_SHORT, "bucket_size": 4},
    "DeepLabV3Backbone": lambda: models.DeepLabV3Backbone(
        image_encoder=_resnet(),
        spatial_pyramid_pooling_key="P4",
        low_level_feature_key="P2",
        dilation_rates=[2, 3],
        upsampling_size=4,
        projection_filters=8,
        image_shape=_IMAGE,
    ),
    "DeiTBackbone": {**_PATCHES, "intermediate_dim": 32},
    "DenseNetBackbone": {"stackwise_num_repeats": [1, 1], "image_shape": _IMAGE, "growth_rate": 8},
    "DepthAnythingBackbone": lambda: models.DepthAnythingBackbone(
        image_encoder=models.DINOV2Backbone(
            **{**_DINO, "num_layers": 2}, apply_layernorm=True, name="image_encoder"
        ),
        reassemble_factors=[2, 1],
        neck_hidden_dims=[8, 16],
        fusion_hidden_dim=8,
        head_hidden_dim=8,
        head_in_index=-1,
        feature_keys=["stage1", "stage2"],
    ),
    "DistilBertBackbone": _SHORT,
    "EdRecBackbone": {
        "vocab_size": 16,
        "num_layers_enc": 1,
        "num_layers_dec": 1,
        "hidden_dim": 16,
        "intermediate_dim": 32,
        "num_heads": 2,
    },
    "EfficientNetBackbone": _efficient_net,
    "ElectraBackbone": {
        "vocab_size": 16,
        "embedding_dim": 16,
        "max_sequence_length": 8,
        **_VISION,
        "intermediate_dim": 32,
    },
    "ESMBackbone": _HEADS,
    "FNetBackbone": {**_TEXT, "max_sequence_length": 8},
    "FalconBackbone": {**_TEXT, "num_attention_heads": 2},
    "FluxBackbone": {
        "input_channels": 16,
        "hidden_size": 32,
        "mlp_ratio": 2.0,
        "num_heads": 2,
        "depth": 1,
        "depth_single_blocks": 1,
        "axes_dim": [4, 6, 6],
        "theta": 10_000,
        "use_bias": True,
        "guidance_embed": True,
        "image_shape": (4, 16),
        "text_shape": (4, 16),
        "image_ids_shape": (4, 3),
        "text_ids_shape": (4, 3),
        "y_shape": (16,),
    },
    "GPT2Backbone": _SHORT,
    "GPTNeoXBackbone": _HEADS,
    "GemmaBackbone": _GEMMA,
    "Gemma3Backbone": _gemma3,
    "Gemma3Backbone with images": _gemma3_with_images,
    "Gemma3nBackbone": {
        "text_vocab_size": 16,
        "text_hidden_size": 16,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": [32],
        "hidden_activation": "gelu_approximate",
        "layer_types": ["full_attention"],
        "sliding_window": 4,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 8,
        "vocab_size_per_layer_input": 16,
        "hidden_size_per_layer_input": 2,
        "altup_num_inputs": 2,
        "laurel_rank": 1,
    },
    "Gemma4Backbone": {**_GEMMA, "image_size": 16},
    "Gemma4Backbone with experts": functools.partial(
        models.Gemma4Backbone,
        **_GEMMA,
        image_size=16,
        enable_moe_block=True,
        num_experts=4,
        expert_intermediate_dim=8,
        num_experts_per_token=2,
    ),
    "GptOssBackbone": {**_GROUPED, "num_experts": 2, "top_k": 1},
    "HGNetV2Backbone": _hgnet,
    "LlamaBackbone": _GROUPED,
    "Llama3Backbone": _GROUPED,
    "MetaCLIP2Backbone": _two_towers("MetaCLIP2", projection_dim=16),
    "MetaCLIP2TextEncoder": _TEXT_TOWER,
    "MetaCLIP2VisionEncoder": _VISION_TOWER,
    "MiTBackbone": _MIT,
    "MistralBackbone": {**_GROUPED, "sliding_window": 4},
    "MixtralBackbone": {**_GROUPED, "num_experts": 4},
    "MobileNetBackbone": _mobile_net,
    "MobileNetV5Backbone": _mobile_net_v5,
    "MoonshineBackbone": {
        "vocabulary_size": 16,
        "filter_dim": 16,
        "encoder_num_layers": 1,
        "decoder_num_layers": 1,
        "hidden_dim": 16,
        "intermediate_dim": 32,
        "encoder_num_heads": 2,
        "decoder_num_heads": 2,
    },
    "OPTBackbone": _SHORT,
    "PARSeqBackbone": _par_seq,
    "PaliGemmaBackbone": {
        **_GEMMA,
        "image_size": 16,
        "vit_patch_size": 4,
        "vit_intermediate_dim": 32,
        **{f"vit_{key}": value for key, value in _VISION.items()},
    },
    "Phi3Backbone": _GROUPED,
    "QwenBackbone": _GROUPED,
    "Qwen3Backbone": _GEMMA,
    "Qwen3MoeBackbone": {**_GROUPED, **_EXPERTS},
    "Qwen3_5Backbone": {**_LINEAR_ATTENTION, "intermediate_dim": 32},
    "Qwen3_5MoeBackbone": {**_LINEAR_ATTENTION, **_EXPERTS, "shared_expert_intermediate_size": 8},
    "QwenMoeBackbone": {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_dim": 8},
    "RQVAEBackbone": lambda: RQVAEBackbone(
        input_dim=16,
        encoder_layer_dims=[32, 16],
        output_dim=8,
        decoder_layer_dims=[16, 32],
        num_embeddings=4,
        num_quantizers=2,
    ),
    "RWKV7Backbone": {
        "hidden_size": 16,
        "head_size": 4,
        "num_layers": 1,
        "vocabulary_size": 16,
        "intermediate_dim": 32,
        **{f"{part}_lora": 8 for part in ("gate", "mv", "aaa", "decay")},
    },
    "ResNetBackbone": _resnet,
    "RetinaNetBackbone": lambda: models.RetinaNetBackbone(
        image_encoder=models.ResNetBackbone(**{**_DEEP, "stackwise_num_filters": [64] * 4}),
        min_level=3,
        max_level=5,
        use_p5=True,
        image_shape=_IMAGE,
    ),
    "RobertaBackbone": _SHORT,
    "RoformerV2Backbone": {**_HEADS, "head_size": 8},
    "SAMBackbone": _sam,
    "SAM3PromptableConceptBackbone": _sam3,
    "SegFormerBackbone": lambda: models.SegFormerBackbone(
        image_encoder=models.MiTBackbone(**_MIT), projection_filters=16
    ),
    "SigLIPBackbone": _two_towers("SigLIP"),
    "SigLIPTextEncoder": _TEXT_TOWER,
    "SigLIPVisionEncoder": _VISION_TOWER,
    "SmolLM3Backbone": {
        **_TEXT,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_layer_enabled_list": [True],
        "layer_types": ["attention"],
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 16,
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 1.0,
    },
    "StableDiffusion3Backbone": _stable_diffusion_3,
    "SwinTransformerBackbone": {
        "image_shape": _IMAGE,
        "embed_dim": 8,
        "depths": (1, 1),
        "num_heads": (2, 2),
        "window_size": 4,
        "drop_path": 0.0,
    },
    "T5Backbone": _HEADS,
    "T5GemmaBackbone": _T5_GEMMA,
    "T5Gemma2Backbone": _T5_GEMMA,
    "VAEBackbone": _vae,
    "VGGBackbone": {
        "stackwise_num_repeats": [1, 1],
        "stackwise_num_filters": [8, 16],
        "image_shape": (16, 16, 3),
    },
    "ViTBackbone": {**_PATCHES, "patch_size": (8, 8), "mlp_dim": 32},
    "ViTDetBackbone": {**_VIT_DET, "image_shape": (16, 16, 3), "patch_size": 4},
    "VideoPrismBackbone": {
        "num_frames": 2,
        "patch_size": 8,
        "hidden_dim": 16,
        "intermediate_dim": 32,
        "num_heads": 2,
        **{f"num_{kind}_layers": 1 for kind in ("spatial", "temporal", "auxiliary")},
        "image_shape": (16, 16, 3),
    },
    "WhisperBackbone": {
        **_HEADS,
        "num_mels": 8,
        "max_encoder_sequence_length": 8,
        "max_decoder_sequence_length": 8,
    },
    "XLMRobertaBackbone": _SHORT,
    "XLNetBackbone": _HEADS,
    "XceptionBackbone": {
        "stackwise_conv_filters": [[8, 16], [16, 24], [16, 32]],
        "stackwise_pooling": [False, True, False],
        "image_shape": _IMAGE,
    },
}

_SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "MoonshineBackbone": {"encoder_input_values": (1600, 1), "encoder_padding_mask": (1600,)},
    "SAMBackbone": {"points": (1, 2), "labels": (1,), "boxes": (1, 2, 2), "masks": (0, 32, 32, 1)},
    "SAM3PromptableConceptBackbone": {"boxes": (1, 5), "box_labels": (1,)},
    "Gemma3Backbone with images": {"images": (1, 16, 16, 3), "vision_indices": (4,)},
}
_INPUTS: dict[str, dict[str, Any]] = {
    "Gemma3Backbone with images": {"vision_indices": _places_of_images, "vision_mask": _of_vision},
    "SAM3PromptableConceptBackbone": {
        "boxes": lambda random, shape: random.uniform(0.2, 0.8, shape),
        "box_labels": lambda random, shape: np.ones(shape),
    },
    "SAMBackbone": {
        "labels": lambda random, shape: np.ones(shape),
        "masks": lambda random, shape: np.zeros(shape),
    },
    "StableDiffusion3Backbone": {"num_steps": lambda random, shape: np.full(shape, 2)},
}


def _with_lora() -> Any:
    backbone = models.GemmaBackbone(**_GEMMA)
    backbone.enable_lora(2)
    return backbone


def _int8() -> Any:
    """Returns a backbone with int8 kernels, of which only low-rank updates are trained."""
    backbone = models.LlamaBackbone(**_GROUPED)
    backbone.quantize("int8")
    backbone.enable_lora(2)
    return backbone


def _generate(model: Any) -> Any:
    prompt = np.ones((4, 6), "int32")
    return model.generate(
        {"token_ids": prompt, "padding_mask": prompt * np.array([1, 1, 1, 0, 0, 0])},
        max_length=6,
        stop_token_ids=None,
    )


def _causal(task: Any, backbone: Any, sizes: dict[str, Any]) -> Callable[[], Any]:
    return lambda: task(backbone=functools.partial(backbone, **sizes)(), preprocessor=None)


def _tokens() -> dict[str, Any]:
    return {
        "compile": {
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "weighted_metrics": [],
            "sampler": "greedy",
        },
        "loss": "tokens",
    }


def _contrastive(y: Any, scores: Any) -> Any:
    """Returns the loss of scores between all images and all texts of a batch."""
    labels = keras.ops.eye(keras.ops.shape(scores)[0])
    return keras.losses.categorical_crossentropy(labels, scores, from_logits=True)


def cases() -> Iterator[Case]:
    """Yields the models of keras-hub."""
    for name, made in _BACKBONES.items():
        build = functools.partial(getattr(models, name), **made) if isinstance(made, dict) else made
        scores = name in ("CLIPBackbone", "MetaCLIP2Backbone", "SigLIPBackbone")
        yield Case(
            name,
            _PACKAGE,
            build,
            sizes=_SIZES.get(name, {}),
            inputs=_INPUTS.get(name, {}),
            loss=_contrastive if scores else "mse",
            own_loss=name == "RQVAEBackbone",
            amplifies=name == "BASNetBackbone",
        )
    yield Case("GemmaBackbone with LoRA", _PACKAGE, _with_lora)
    yield Case("LlamaBackbone in int8 with LoRA", _PACKAGE, _int8)
    for task, backbone, sizes in (
        (models.GPT2CausalLM, models.GPT2Backbone, _SHORT),
        (models.GemmaCausalLM, models.GemmaBackbone, _GEMMA),
        (models.MistralCausalLM, models.MistralBackbone, {**_GROUPED, "sliding_window": 4}),
        (models.MixtralCausalLM, models.MixtralBackbone, {**_GROUPED, "num_experts": 4}),
    ):
        yield Case(
            f"{task.__name__} with generate",
            _PACKAGE,
            _causal(task, backbone, sizes),
            after=_generate,
            **_tokens(),
        )
    yield Case(
        "BertTextClassifier",
        _PACKAGE,
        lambda: models.BertTextClassifier(
            backbone=functools.partial(models.BertBackbone, **_SHORT)(),
            num_classes=3,
            dropout=0.0,
            activation="softmax",
            preprocessor=None,
        ),
        classes=3,
    )
    yield Case(
        "ResNetImageClassifier",
        _PACKAGE,
        lambda: models.ResNetImageClassifier(
            backbone=_resnet(), num_classes=3, activation="softmax", preprocessor=None
        ),
        classes=3,
    )
    yield Case(
        "SegFormerImageSegmenter",
        _PACKAGE,
        lambda: models.SegFormerImageSegmenter(
            backbone=models.SegFormerBackbone(
                image_encoder=models.MiTBackbone(**_MIT), projection_filters=16
            ),
            num_classes=4,
            preprocessor=None,
        ),
    )
