"""Calls of TensorFlow's functions, and what TensorFlow returns.

Run as a program where TensorFlow is installed, it writes the results to `RESULTS`.
"""

from pathlib import Path

import numpy as np

RESULTS = Path(__file__).with_name("tensorflow-2.21.npz")

_rng = np.random.default_rng(0)
F = _rng.normal(size=(4, 3)).astype("float32")
G = _rng.normal(size=(4, 3)).astype("float32")
I = _rng.integers(1, 7, (4, 3)).astype("int32")  # noqa: E741
P = np.abs(F) + 0.1  # positive
U = np.tanh(F)  # from -1 to 1
L = np.array([0, 2, 1, 2], "int32")  # labels
D = np.array([[1, 0, 0], [0.2, 0.3, 0.5], [0, 1, 0], [0, 0, 1]], "float32")  # distributions
IMG = _rng.normal(size=(2, 6, 6, 3)).astype("float32")
K = _rng.normal(size=(3, 3, 3, 4)).astype("float32")
V = _rng.uniform(0, 1, (2, 6, 5, 3)).astype("float32")  # images from 0 to 1
B = _rng.integers(0, 256, (7, 6, 3)).astype("uint8")
SQ = F @ F.T + np.eye(4, dtype="float32")
WAV = (  # 2 channels of 16 bits, 8000 Hz
    b"RIFF8\0\0\0WAVEfmt \x10\0\0\0\x01\0\x02\0\x40\x1f\0\0\0\x7d\0\0\x04\0\x10\0data\x10\0\0\0"
    + _rng.integers(-(2**15), 2**15, 8).astype("<i2").tobytes()
)

CALLS = (
    """
tf.abs(F); tf.acos(U); tf.asin(U); tf.atan(F); tf.cos(F); tf.cosh(F); tf.cumsum(F); tf.exp(F)
tf.floor(F); tf.negative(F); tf.round(F); tf.sigmoid(F); tf.sign(F); tf.sin(F); tf.sinh(F)
tf.sqrt(P); tf.square(F); tf.tan(F); tf.tanh(F); tf.math.add(F, G); tf.math.atan2(F, G)
tf.math.divide(F, G); tf.math.equal(F, G); tf.math.greater(F, G); tf.math.greater_equal(F, G)
tf.math.less(F, G); tf.math.less_equal(F, G); tf.math.maximum(F, G); tf.math.minimum(F, G)
tf.math.multiply(F, G); tf.math.not_equal(F, G); tf.math.pow(P, G); tf.math.subtract(F, G)
tf.reduce_max(F); tf.reduce_min(F); tf.reduce_prod(F); tf.reduce_sum(F)
tf.reduce_sum(F, [0, 1], True); tf.reduce_sum(input_tensor=F, axis=-1, keepdims=True)
tf.reduce_mean(F); tf.reduce_mean(F, [0, 1], True)
tf.reduce_mean(input_tensor=F, axis=-1, keepdims=True); tf.reduce_logsumexp(F)
tf.math.reduce_std(F); tf.math.reduce_variance(F); tf.math.ceil(F); tf.math.erf(F); tf.math.expm1(F)
tf.math.is_finite(F); tf.math.is_inf(F); tf.math.is_nan(F); tf.math.log_sigmoid(F)
tf.math.reciprocal(F); tf.math.softplus(F); tf.nn.elu(3 * F); tf.nn.gelu(3 * F)
tf.nn.leaky_relu(3 * F); tf.nn.log_softmax(3 * F); tf.nn.relu(3 * F); tf.nn.relu6(3 * F)
tf.nn.selu(3 * F); tf.nn.sigmoid(3 * F); tf.nn.silu(3 * F); tf.nn.softmax(3 * F)
tf.nn.softplus(3 * F); tf.nn.swish(3 * F); tf.nn.tanh(3 * F); tf.reduce_mean(I)
tf.reduce_mean(-I,axis=0); tf.reduce_sum(I); tf.reduce_all(F>0,axis=0); tf.reduce_any(F>1)
tf.logical_and(F>0,G>0); tf.logical_or(F>0,G>0); tf.logical_not(F>0); tf.math.logical_xor(F>0,G>0)
tf.math.cumprod(F); tf.cumsum(F,axis=1); tf.cumsum(F,axis=1,exclusive=True)
tf.cumsum(F,reverse=True); tf.math.cumprod(F,exclusive=True,reverse=True)
tf.math.segment_max(F,[0,0,2,2]); tf.math.segment_min(I,[0,0,2,2])
tf.math.unsorted_segment_max(F,[3,0,0,3],num_segments=5)
tf.math.unsorted_segment_min(I,[3,0,0,3],num_segments=5); tf.repeat(L,[1,0,2,3])
tf.while_loop(lambda i,x: i<9,lambda i,x: (i+1,x*2.0),(0,F),maximum_iterations=3)
tf.nn.conv2d(IMG,K,1,[[0,0],[1,2],[0,1],[0,0]]); tf.linalg.cholesky(SQ); tf.linalg.det(SQ)
tf.linalg.eigh(SQ)[0]; tf.linalg.svd(F,compute_uv=False); tf.linalg.svd(F)[0]; tf.linalg.solve(SQ,G)
tf.linalg.solve(SQ,G,adjoint=True); tf.linalg.inv(SQ); tf.linalg.diag(F); tf.linalg.diag_part(SQ)
tf.linalg.trace(SQ); tf.linalg.pinv(F); tf.linalg.slogdet(SQ); tf.math.log(P); tf.math.log1p(P)
tf.math.rsqrt(P); tf.math.floordiv(I,2); tf.math.floormod(I,2); tf.math.mod(F,2.)
tf.math.squared_difference(F,G); tf.math.truediv(I,2); tf.clip_by_value(F,-.5,.5)
tf.clip_by_value(t=F,clip_value_min=-.1,clip_value_max=.1); tf.convert_to_tensor([1,2])
tf.expand_dims(F,-1); tf.eye(3); tf.eye(3,4); tf.identity(F); tf.linspace(0.,1.,5); tf.ones([2,3])
tf.ones_like(I); tf.zeros((2,)); tf.zeros_like(F,dtype=tf.int32); tf.one_hot(L,3)
tf.one_hot(L,depth=4,axis=0); tf.repeat(F,2,axis=1); tf.repeat(F,2); tf.reshape(F,[-1,2])
tf.reshape(F,(12,)); tf.reverse(F,[0]); tf.squeeze(F[:,:1]); tf.squeeze(F[:,:1],axis=1)
tf.stop_gradient(F); tf.tensordot(F,G.T,1); tf.tensordot(F,G,[[0],[0]]); tf.tile(F,[2,1])
tf.transpose(F); tf.transpose(IMG,perm=(3,0,1,2)); tf.where(F>0,F,G); tf.where(F>0,1.,0.)
tf.argmax(F); tf.argmax(F,1); tf.argmin(F,axis=-1); tf.math.argmax(F,output_type=tf.int32)
tf.add_n([F,G,F]); tf.cast(F,tf.int32); tf.cast([True,False],tf.float32); tf.cast(F,"bool")
tf.constant(3); tf.constant([1.,2.]); tf.constant(5.,shape=[2,2])
tf.constant([1,2,3,4],shape=[2,2],dtype=tf.float32); tf.fill([2,3],7); tf.range(5); tf.range(1,7,2)
tf.range(3.); tf.shape(F); tf.size(F); tf.concat([F,G],0); tf.concat([F,G],axis=-1)
tf.stack([F,G],axis=-1); tf.unstack(F,axis=1); tf.split(F,2); tf.split(F,[1,2],axis=1)
tf.matmul(F,G,transpose_b=True); tf.matmul(F,G,True); tf.einsum("ij,kj->ik",F,G); tf.gather(F,L[:2])
tf.gather(F,[[0,1],[2,2]],axis=1); tf.gather(F,[[0],[1],[2],[0]],batch_dims=1,axis=1)
tf.gather(IMG,np.array([[1,0],[2,3]]),batch_dims=1); tf.gather_nd(F,[[0,1],[2,2]])
tf.boolean_mask(F,[True,False,True,True]); tf.pad(F,[[1,0],[0,2]])
tf.pad(F,[[1,1],[1,1]],"REFLECT"); tf.pad(F,[[1,1],[1,1]],constant_values=2.); tf.norm(F)
tf.norm(F,ord=1,axis=1,keepdims=True); tf.linalg.norm(F,1); tf.norm(F,axis=[0,1])
tf.norm(F,keepdims=True); tf.math.count_nonzero(F>0,axis=1); tf.math.count_nonzero(I)
tf.clip_by_norm(F,1.); tf.clip_by_norm(F,1.,axes=1); tf.linalg.global_norm([F,G])
tf.clip_by_global_norm([F,G],1.5); tf.clip_by_global_norm([F,G],100.); tf.math.top_k(F,2)
tf.nn.top_k(F); tf.math.in_top_k(L,F,2); tf.nn.in_top_k(L,F,k=1); tf.math.l2_normalize(F,1)
tf.nn.l2_normalize(F); tf.math.divide_no_nan(F,[1.,0.,2.]); tf.math.confusion_matrix(L,[0,1,1,2])
tf.math.confusion_matrix(L,[0,1,1,2],num_classes=4,weights=[.5,1,1,2],dtype=tf.float32)
tf.nn.gelu(F,True); tf.nn.leaky_relu(F,alpha=.3); tf.nn.softmax(F,axis=0)
tf.nn.softmax_cross_entropy_with_logits(D,F)
tf.nn.softmax_cross_entropy_with_logits(labels=D.T,logits=F.T,axis=0)
tf.nn.sparse_softmax_cross_entropy_with_logits(L,F)
tf.nn.sigmoid_cross_entropy_with_logits(labels=D,logits=10*F); tf.nn.l2_loss(F)
tf.nn.moments(F,[0]); tf.nn.moments(F,axes=[0,1],keepdims=True); tf.nn.bias_add(F,F[0])
tf.nn.conv2d(IMG,K,1,"SAME"); tf.nn.conv2d(IMG,K,[1,2,2,1],"VALID")
tf.nn.conv2d(IMG,K,[2,1],"SAME"); tf.nn.conv2d(IMG,K,1,"VALID",dilations=2)
tf.nn.max_pool2d(IMG,2,2,"VALID"); tf.nn.max_pool2d(IMG,[1,3,3,1],[1,2,2,1],"SAME")
tf.nn.avg_pool2d(IMG,3,2,"SAME"); tf.nn.compute_average_loss(P[:,0])
tf.nn.compute_average_loss(P[:,0],sample_weight=[1.,0.,2.,1.],global_batch_size=16)
tf.nn.compute_average_loss(P,P); tf.nn.scale_regularization_loss(F)
tf.nn.embedding_lookup(F,[[0,1],[2,2]]); tf.math.reduce_max([[1,2],[3,4]],1); tf.add([1,2],3)
tf.multiply(F,2); tf.maximum(0.,F); tf.pow(F,2); tf.one_hot(L,3,5.,-1.)
tf.one_hot(L,3,on_value=2,axis=0); tf.where(F>0); tf.transpose(F,conjugate=True)
tf.eye(2,batch_shape=[3]); tf.matmul(F,G,adjoint_b=True)
tf.gather_nd(IMG,np.array([[[1,2]],[[0,5]]]),batch_dims=1); tf.foldr(lambda a,x:a*.5+x,F)
tf.foldr(lambda a,x:a-x,F,initializer=G[0])
tf.case([(tf.constant(False),lambda:1.),(tf.constant(True),lambda:2.)],default=lambda:3.)
tf.case([(tf.constant(False),lambda:1.)],default=lambda:3.)
tf.switch_case(tf.constant(5),{1:lambda:10.,0:lambda:50.},default=lambda:0.)
tf.switch_case(tf.constant(7),[lambda:10.,lambda:50.])
tf.cond(tf.reduce_sum(P)>0,lambda:F,lambda:G)
tf.TensorArray(tf.float32,3).unstack(F[:3]).write(1,G[0]).stack()
tf.TensorArray(tf.float32,0,dynamic_size=True).write(2,G[0]).write(1,F[0]).gather([2,1])
tf.TensorArray(tf.float32,2).split(F,[2,2]).concat()
tf.TensorArray(tf.float32,2).scatter([1,0],F[:2]).read(0)
tf.py_function(lambda x:x.numpy()*2,[F],tf.float32)
tf.numpy_function(lambda x,y:(x+y,x-y),[F,G],[tf.float32,tf.float32])
tf.get_static_value(tf.constant([1,2])); tf.image.resize_with_crop_or_pad(IMG,4,9)
tf.image.resize_with_crop_or_pad(IMG,7,3); tf.image.adjust_brightness(V,.3)
tf.image.adjust_brightness(B,-.2); tf.image.adjust_contrast(V,1.7); tf.image.adjust_contrast(B,.4)
tf.image.adjust_hue(V,.2); tf.image.adjust_hue(B,-.4); tf.image.adjust_hue(IMG,.1)
tf.image.adjust_saturation(V,1.8); tf.image.adjust_saturation(B,.3); tf.image.central_crop(V,.5)
tf.image.central_crop(B,.7); tf.image.crop_to_bounding_box(V,1,2,3,2)
tf.image.pad_to_bounding_box(B,1,2,9,9)
tf.image.extract_patches(IMG,[1,2,2,1],[1,2,2,1],[1,1,1,1],"VALID")
tf.image.extract_patches(IMG,[1,3,3,1],[1,2,2,1],[1,1,1,1],"SAME")
tf.image.grayscale_to_rgb(tf.constant(V[...,:1])); tf.image.rgb_to_grayscale(V)
tf.image.rgb_to_grayscale(B); tf.image.psnr(V,V**2,2.); tf.image.psnr(B,B[::-1],max_val=255)
tf.image.rot90(V); tf.image.rot90(B,k=3); tf.image.resize(B,[10,7],"nearest")
tf.linalg.band_part(IMG,1,2); tf.linalg.band_part(F,-1,0); tf.linalg.band_part(F,0,-1)
tf.nn.max_pool(IMG,[1,3,3,1],[1,2,2,1],"SAME"); tf.nn.avg_pool(IMG,2,2,"VALID")
tf.nn.depthwise_conv2d(IMG,K,[1,1,1,1],"SAME")
tf.nn.depthwise_conv2d(IMG,K,strides=[1,2,2,1],padding="VALID"); tf.audio.decode_wav(WAV)
tf.audio.decode_wav(WAV,desired_channels=3,desired_samples=5); tf.audio.decode_wav(WAV,1,2)
tf.as_string([1,-20]); tf.as_string([1.5,2.],precision=2); tf.as_string([1.5,2.])
tf.as_string([True,False]); tf.as_string([3],width=4,fill="0")
tf.as_string([1.5e-5],scientific=True); tf.strings.join(["a",["b","c"]],"-")
tf.strings.lower(["ABc"]); tf.strings.upper("ab1"); tf.strings.strip(["  a b "])
tf.strings.length(["a","bcd"]); tf.strings.length("h\u00e4","UTF8_CHAR")
tf.strings.length("h\u00e4"); tf.strings.substr(["hello","world"],-3,2); tf.strings.split("a  b c")
tf.strings.split("a,b,,c",","); tf.strings.split("a,b,c",",",1); tf.strings.bytes_split("abc")
tf.strings.ngrams(["a","b","c","d"],2); tf.strings.ngrams(["a","b","c","d"],(1,3),separator="|")
tf.strings.ngrams(["a","b","c","d"],4,pad_values="P",padding_width=2)
tf.strings.ngrams(["a","b","c","d"],3,pad_values=("L","R"),padding_width=1)
tf.strings.ngrams(["a"],1,pad_values="P")
tf.strings.ngrams(["a","b"],[3,4],preserve_short_sequences=True)
tf.strings.ngrams(["a","b"],[2,4],preserve_short_sequences=True)
tf.strings.regex_replace(["a1b22"],"[0-9]+","<\\\\0>")
tf.strings.regex_replace("aXbXc","X","-",replace_global=False)
tf.strings.regex_full_match(["ab","abc"],"a.")
tf.strings.reduce_join([["a","b"],["c","d"]],axis=1,separator="+")
tf.strings.reduce_join(["a","b"])
tf.strings.format("{} and {}",(tf.constant([1,2]),tf.constant(3)))
tf.strings.to_number(["1.5","-2"])
tf.lookup.StaticHashTable(T(tf,["a","b"],[3,4]),-1).lookup(tf.constant(["b","x","a"]))
tf.lookup.StaticHashTable(T(tf,[7,2],[.5,1.5]),9.).lookup(tf.constant([2,7,1]))
tf.lookup.StaticHashTable(T(tf,[7,2],["x","y"]),"none").lookup(tf.constant([2,1]))
tf.lookup.StaticVocabularyTable(T(tf,["a","b"],np.array([0,1])),1).lookup(tf.constant(["z","b"]))
tf.lookup.StaticVocabularyTable(T(tf,["a","b"],np.array([0,1])),3).size()
tf.io.decode_csv(["1,2.5,x","4,,z"],[[0],[1.],[""]]); tf.io.decode_csv("7;8",[0,0],field_delim=";")
tf.io.decode_csv("7,8,9",[tf.constant([],tf.float32)],select_cols=[1]); tf.io.serialize_tensor(F)
tf.io.parse_tensor(tf.io.serialize_tensor(I),tf.int32); tf.io.encode_base64("h\u00e4?>")
tf.io.decode_base64("aMOkPz4"); tf.constant(["a","bc"]); tf.constant("a")
tf.TensorShape([None,3]).merge_with([2,3]).as_list()
tf.TensorShape([2,3]).most_specific_compatible_shape([2,4]).as_list()[:1]
""".strip()
    .replace("\n", "; ")
    .split("; ")
)


def T(tf, keys, values):  # noqa: N802
    """The content of a table."""
    return tf.lookup.KeyValueTensorInitializer(keys, values)


def results(tf, call):
    """The arrays that a call returns; text in place of bytes of UTF-8."""
    found = eval(call, {**globals(), "tf": tf})
    parts = tf.nest.flatten(found) if isinstance(found, (list, tuple)) else [found]
    return [_as_text(np.asarray(part)) for part in parts]


def _as_text(array):
    if array.dtype.kind not in "SO":
        return array
    return np.array([one.decode("latin1") for one in array.ravel().tolist()]).reshape(array.shape)


if __name__ == "__main__":
    import tensorflow

    arrays = {
        f"{call} [{i}]": array
        for call in CALLS
        for i, array in enumerate(results(tensorflow, call))
    }
    np.savez_compressed(RESULTS, **arrays)
